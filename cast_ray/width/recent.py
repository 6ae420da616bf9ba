"""The candidates of recent rounds, request by request, as arrays to try a decision on. It decides nothing itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cast_ray.width.curve import Array

Whole = NDArray[np.int64]

# Requests' candidates that are kept; how many a load with fewer requests is judged by.
REMEMBERED, RECENT = 256, 32


class Recent:
    """A ring of mass rows `[REMEMBERED, max_nodes]`, each one request's in one round, heaviest first."""

    def __init__(self, max_nodes: int) -> None:
        self._masses = np.zeros((REMEMBERED, max_nodes))
        self._counts = np.zeros(REMEMBERED, dtype=np.int64)
        self._claims = np.zeros(REMEMBERED)
        self.seen = 0

    def add(self, masses: Array, counts: Whole, claims: Array | None = None) -> None:
        """Expected masses [B, N] of a round's requests and their numbers of nodes [B].

        claims: [B], of the next token's probability, how much they hold.
        """
        kept = slice(-REMEMBERED, None)
        masses, counts = masses[kept, : self._masses.shape[1]], np.minimum(counts[kept], self._masses.shape[1])
        places = (self.seen + np.arange(len(counts))) % REMEMBERED
        self._masses[places] = 0.0
        self._masses[places, : masses.shape[1]] = masses
        self._counts[places] = counts
        self._claims[places] = 0.0 if claims is None else claims[kept]
        self.seen += len(counts)

    def rounds(self, batch: int, most: int = RECENT) -> tuple[Array, Whole, Array]:
        """As rounds of `batch` requests, the latest: masses [G, B, N], counts and claims [G, B]; at most `most` rounds.

        Where more requests run than are remembered, some stand for several.
        """
        known = min(self.seen, REMEMBERED, max(RECENT, batch))
        rounds = min(max(1, known // batch), most)
        rows = (self.seen - 1 - np.arange(rounds * batch) % known) % REMEMBERED
        shape = (rounds, batch)
        return (
            self._masses[rows].reshape(*shape, -1),
            self._counts[rows].reshape(shape),
            self._claims[rows].reshape(shape),
        )


def together(drafted: Array, offered: Array, claims: Array, most: int) -> tuple[Array, Whole]:
    """What a drafter's candidates and others at hand would be as one tree: masses [G, B, n], heaviest first, counts.

    drafted: [G, B, N]; offered: [G, B, K] or [B, K]. claims: [G, B] or [B], what the others hold of the next token's
    probability: the drafter's get the rest, as `trees.merge` has it, but that equal prefixes are not looked for.
    """
    rest = drafted * (1.0 - np.minimum(claims, 1.0))[..., None]
    offered = np.broadcast_to(offered, (*rest.shape[:2], offered.shape[-1]))
    both = -np.sort(-np.concatenate([rest, offered], axis=2), axis=2)[..., :most]
    return both, (both > 0).sum(axis=2)
