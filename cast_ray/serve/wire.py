"""What travels between the API and an engine replica: a question, and its answer in pieces. Plain picklable values.

A request that fails does so in a piece with `failure` set: an exception would come out of Ray with a stack trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cast_ray.request import ChatMessage, Completion, Prompt, SamplingParams, TokenLogprob
from cast_ray.serve.tagged import ChatReader

# Lower numbers go first in every round.
ONLINE, BATCH = 0, 1
# Characters of a block of a prompt's beginning, and blocks that are looked at, when replicas are compared by what they
# have read before. A block is a few KV pages.
PREFIX_BLOCK, PREFIX_BLOCKS = 256, 64
CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample of one prompt. tools, template: what a chat's template is given besides the messages. traced: whether
    its pieces show the trees of their rounds. lookup_scope: see `Engine.submit`; None shares nothing. whole: it is told
    in one piece, at its end; telling of every round takes processor time that decoding could have."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = ONLINE
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    traced: bool = False
    lookup_scope: str | None = None
    whole: bool = False

    @property
    def characters(self) -> int:
        """Length of the prompt, roughly: what it takes to read it is predicted from this."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        if self.prompt and isinstance(self.prompt[0], int):
            return CHARACTERS_A_TOKEN * len(self.prompt)
        return sum(len(text) for text in _texts(self.prompt))

    def prefix_hashes(self) -> list[int]:
        """A hash of each beginning of the prompt that is whole blocks long; equal beginnings have equal hashes."""
        if isinstance(self.prompt, str):
            text = self.prompt
        elif self.prompt and isinstance(self.prompt[0], int):
            text = " ".join(map(str, self.prompt[: PREFIX_BLOCK * PREFIX_BLOCKS]))
        else:
            text = "\x1f".join(_texts(self.prompt))
        running, hashes = hashlib.blake2b(repr(self.tools).encode(), digest_size=8), []
        for start in range(0, min(len(text), PREFIX_BLOCK * PREFIX_BLOCKS) - PREFIX_BLOCK + 1, PREFIX_BLOCK):
            running.update(text[start : start + PREFIX_BLOCK].encode("utf-8", "surrogatepass"))
            hashes.append(int.from_bytes(running.digest(), "big"))
        return hashes


def _texts(messages: Any) -> list[str]:
    return [f"{message.get('role')}\x1e{message.get('content')}" for message in messages if isinstance(message, dict)]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered. kind: name of the error's class; message: fit for the client to read."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ShownTree:
    """A round's tree, see `engine.trace.RoundTrace`. texts: of each node's token. emitted: texts that it committed."""

    texts: list[str]
    parents: list[int]
    masses: list[float]
    accepted: list[int]
    emitted: list[str]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a round committed for a request: text that may be shown now, tokens, and the completion at the end.

    rounds: more than one where they came faster than they could be told of. trees: of these rounds, where asked for.

    logprobs: of the tokens, where asked for. words: the text of every token that these name; with the completion of
    those that the prompt's name as well.
    reader: how to read the text of a chat's answer; with the first piece.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    rounds: int = 0
    trees: tuple[ShownTree, ...] = ()
    completion: Completion | None = None
    failure: Failure | None = None
    words: dict[int, str] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reader: ChatReader | None = None


def decode_s(completion: Completion) -> float:
    """Seconds from a request's first token to its last."""
    return max(0.0, completion.stats.total_ms - completion.stats.time_to_first_token_ms) / 1000


def named_tokens(rows: Iterable[TokenLogprob | None]) -> list[int]:
    """Every token id that some log probabilities name."""
    found: set[int] = set()
    for row in rows:
        if row is not None:
            found.add(row.token_id)
            found.update(token for token, _ in row.top)
    return sorted(found)


def messages_of(prompt: Prompt) -> list[ChatMessage] | None:
    """The chat in a prompt, or None for text and ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return prompt
    return None
