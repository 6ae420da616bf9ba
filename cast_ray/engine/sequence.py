"""The running state of one request, owned by the scheduler. Plain values; no model and no tensor."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cast_ray.engine.detokenise import OutputText
from cast_ray.engine.samples import Samples
from cast_ray.engine.trace import RoundTrace
from cast_ray.models.pages import page_key
from cast_ray.request import RequestStats, SamplingParams
from cast_ray.sampling.emitting import Emitting


@dataclass(frozen=True)
class Ending:
    """Why an output ends, as a Completion says it. hides_last: the last token is none of the text."""

    reason: str
    stop_reason: str | int | None = None
    hides_last: bool = False


@dataclass(eq=False)
class Sequence:
    """One request from submission to its end.

    tokens: prompt and everything committed since; the last is the root once the rest is in the cache.
    cached: tokens whose keys and values are in the pool, always a prefix of `tokens`.
    scratch: token places behind its tokens that it needs, where that is more than others need.
    priority: lower numbers first. arrival: number of the submission, which decides among equals.
    pages: its block table; the first `published` of them are whole and have been offered to the prefix cache.
    keys: identities of its first whole pages, as far as they have been asked for.
    text: its output's text, kept while it streams or has stop strings; fresh: what of it no event has shown yet.
    emitting: how it emits, for one that asks for more than argmax or a plain sample.
    traced: whether it wants to see its rounds; trace: the last one, until an event has shown it.
    lookup_scope: requests of the same one may look up candidates in each other's finished outputs; None: in none.
    ending: set by the round that it ends with. samples, index: its place among the samples of one request.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    max_length: int  # tokens at which it ends, prompt included
    scratch: int = 0
    priority: int = 0
    arrival: int = 0
    queued_at: int = 0  # the scheduler's step
    pages: list[int] = field(default_factory=list)
    published: int = 0
    keys: list[bytes] = field(default_factory=list)
    row: int = -1  # of the block tables, -1 while it waits
    cached: int = 0
    text: OutputText | None = None
    fresh: str = ""
    streams: bool = False
    emitting: Emitting | None = None
    traced: bool = False
    trace: RoundTrace | None = None
    lookup_scope: str | None = None
    ending: Ending | None = None
    samples: Samples | None = None
    index: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def decoding(self) -> bool:
        """Everything but the root is in the cache."""
        return self.cached == len(self.tokens) - 1

    @property
    def shown_id(self) -> str:
        """The id of its request."""
        return self.request_id if self.samples is None else self.samples.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower."""
        return self.priority, self.arrival

    def key(self, page: int, page_size: int) -> bytes:
        """Identity of the page of this index, all of whose tokens are known."""
        for index in range(len(self.keys), page + 1):
            parent = self.keys[-1] if self.keys else b""
            self.keys.append(page_key(parent, self.tokens[index * page_size : (index + 1) * page_size]))
        return self.keys[page]
