"""Which requests take part in the next step: admission by free pages, prompts cut into chunks, decoding first.

Owns every request's running state (`Sequence`) and the pages. It knows no model and no tensor but block tables.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cast_ray.models.kv_cache import PageAllocator
from cast_ray.request import RequestStats, SamplingParams


@dataclass
class Sequence:
    """One request while it runs.

    tokens: prompt and everything committed since; the last is the root once the prompt is in the cache.
    cached: tokens whose keys and values are in the pool, always a prefix of `tokens`.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    max_length: int  # tokens at which it ends, prompt included
    pages: list[int] = field(default_factory=list)
    row: int = -1  # of the block tables
    cached: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def decoding(self) -> bool:
        """Everything but the root is in the cache."""
        return self.cached == len(self.tokens) - 1


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens `start` to `end` (exclusive) of a sequence, to be put into the cache."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """Who takes part in a step."""

    decoding: list[Sequence]
    chunks: list[Chunk]


class Scheduler:
    """First come, first served.

    scratch: token places kept free behind a request's tokens, for the nodes of a tree or the drafter's block.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        max_batch: int,
        max_context: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.scratch = scratch
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tables: Tensor = torch.zeros(max_batch, self.pages_for(max_context), dtype=torch.int64, device=device)
        self._free_rows = list(range(max_batch - 1, -1, -1))

    def pages_for(self, length: int) -> int:
        """Pages of a request that grows to `length` tokens."""
        return -(-(length + self.scratch) // self.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller has checked that it fits the pool."""
        self.waiting.append(sequence)

    def plan(self, prompt_tokens: int) -> Plan:
        """Admit what fits, then choose: every decoding request, and prompt chunks of up to `prompt_tokens` in all."""
        self._admit()
        chunks, left = [], prompt_tokens
        for sequence in self.running:
            if left > 0 and not sequence.decoding:
                end = min(len(sequence.tokens) - 1, sequence.cached + left)
                chunks.append(Chunk(sequence, sequence.cached, end))
                left -= end - sequence.cached
        return Plan([s for s in self.running if s.decoding], chunks)

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a sequence out, wherever it is. Returns the pages that it gave back."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return []
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        pages, sequence.pages = sequence.pages, []
        self.allocator.free(pages)
        return pages

    def check_integrity(self) -> None:
        """Every page free or owned once, every table row in use once; EngineError otherwise."""
        self.allocator.check_integrity(sequence.pages for sequence in self.running)

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            count = self.pages_for(sequence.max_length)
            if count > self.allocator.num_free:
                return
            self.waiting.popleft()
            sequence.pages = self.allocator.allocate(count)
            sequence.row = self._free_rows.pop()
            self.tables[sequence.row, :count] = torch.tensor(sequence.pages, device=self.tables.device)
            self.running.append(sequence)
