"""What a width is chosen for, and what the round then took: the two things that policies hear of a round.

No model, and but for the temperatures plain numbers of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cast_ray.trees.merge import Offer


@dataclass(frozen=True)
class RoundShape:
    """The load of one round, known before it starts.

    contexts: cached tokens of each decoding request, B numbers, at least one.
    chunk_tokens: prompt tokens that ride along in the same forward.
    temperatures: [B] float32, None when all requests are greedy.
    offer: candidates that are at hand without drafting, None for none.
    drafted: False where the drafter does not run in this round, so that its time is not spent.
    """

    contexts: Sequence[int]
    chunk_tokens: int = 0
    temperatures: Tensor | None = None
    offer: Offer | None = None
    drafted: bool = True

    @property
    def batch(self) -> int:
        """B, the decoding requests."""
        return len(self.contexts)

    @property
    def mean_context(self) -> float:
        """Cached tokens of a request, on average."""
        return sum(self.contexts) / len(self.contexts)


@dataclass(frozen=True)
class RoundTimes:
    """What one finished round took.

    tokens: packed rows of its forward, prompt chunks included. drafted: whether the drafter ran.
    draft_ms, verify_ms, host_ms: wall ms. committed: tokens that all its requests gained together.
    """

    shape: RoundShape
    tokens: int
    drafted: bool
    draft_ms: float
    verify_ms: float
    host_ms: float
    committed: int

    @property
    def total_ms(self) -> float:
        """The whole round, wall ms."""
        return self.draft_ms + self.verify_ms + self.host_ms
