"""The contract of a drafter: what it is shown after each forward, and what it proposes before a round.

A drafter scores future tokens; it never decides what is emitted. Trees are packed from its scores elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from cast_ray.trees.pack import DraftScores


@dataclass(frozen=True)
class DraftContexts:
    """The requests of a round, seen by the drafter.

    roots: `[B]` int64, the last committed token of each request, which has no KV entry yet.
    lengths: tokens before the root (B numbers), which is also the root's position.
    positions: the same as an `[B]` int64 tensor.
    tables: `[B, P]` int64 KV pages, shared with the target.
    temperatures: `[B]` float32; None when every request is greedy.
    """

    roots: Tensor
    lengths: list[int]
    positions: Tensor
    tables: Tensor
    temperatures: Tensor | None


class Drafter(Protocol):
    """See the module."""

    block_size: int
    taps: tuple[int, ...]

    def shape(self) -> dict[str, Any]:
        """What its speed depends on, as plain values: a part of the key of latency profiles."""
        ...

    def observe(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Take in the target's features `[n, taps * hidden]` of committed tokens, by KV slot and position `[n]`.

        Cheap: a round that does not draft pays for it too.
        """
        ...

    def propose(self, contexts: DraftContexts, top_k: int) -> DraftScores:
        """Scores of the `block_size - 1` tokens after each root, the `top_k` best at each depth.

        A drafter with pairwise scores gives all candidates that they are normalised over, whatever `top_k`: which of
        them are best depends on the parent.
        """
        ...

    def forget(self, pages: list[int]) -> None:
        """Drop what is kept for these pages: nobody uses them any more, and another request may own them next.

        A page that stays in the prefix cache is not forgotten: whoever takes it over finds the drafter's part of it.
        """
        ...
