"""Where candidates come from, and how far each source is to be believed: learnt from every token that is committed.

A source's word is held against what the target wrote next, whether the candidate was verified or not: so nothing has
to be tried to be learnt, and a source that was wrong can come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cast_ray.drafters.suffix import Whole

Array = NDArray[np.float64]

# Match lengths (tokens) that share a class, by their upper ends, and what a candidate behind such a match is worth
# before anything is known of the source.
LENGTHS = np.array([2, 3, 5, 7, 11, 15, 23, 31])
FIRST_GUESS = np.array([0.35, 0.45, 0.55, 0.65, 0.72, 0.8, 0.87, 0.92, 0.95])
# Shares of the matches that go on with the same token, by upper ends; then those that all do: one, or several.
SHARES = np.array([0.15, 0.35, 0.65, 0.999])
SHARE_GUESS = np.array([0.1, 0.25, 0.5, 0.8, 1.0, 1.05])
CELLS = len(FIRST_GUESS) * len(SHARE_GUESS)
# Looks that the first guess is worth against a class's own record, and that the record of all is worth for a source.
PRIOR, SOURCE_PRIOR = 4.0, 3.0
# How far a good source is believed beyond the first guess where a class has not been seen.
MOST_LEAN = 1.0
# Request-rounds after which what was seen weighs half; of one request, candidates looked at.
HALF_LIFE, OWN_HALF_LIFE = 192.0, 12.0
LEAST, MOST = 0.02, 0.99


class SourceTrust:
    """How likely a candidate is the target's next token, given that all before it were.

    sources: how many there are. rows: requests that run at once, each of which has a record of its own besides.
    Classes: source, length of the match that stands behind the candidate, share of the matches that go on so.
    """

    def __init__(self, sources: int, rows: int) -> None:
        self.sources = sources
        guess = np.minimum(FIRST_GUESS[:, None] * SHARE_GUESS, MOST)
        self._guess: Array = np.tile(guess.ravel(), sources)
        self._tried: Array = np.zeros(sources * CELLS)
        self._right: Array = np.zeros(sources * CELLS)
        self._own: Array = np.zeros((2, rows * sources))  # expected, right
        self._worth: Array = self._guess.copy()

    def cell(self, source: Whole, length: Whole, share: Array, votes: Whole) -> Whole:
        """Class of candidates `[n]`: of a source, behind a match of so many tokens, with a share of so many votes."""
        shares = SHARES.searchsorted(share) + ((share > SHARES[-1]) & (votes > 1))
        return source * CELLS + LENGTHS.searchsorted(length) * len(SHARE_GUESS) + shares

    def worth(self, cells: Whole, rows: Whole) -> Array:
        """Probability of candidates `[n]` of these classes, in requests of these rows."""
        expected, right = self._own[:, rows * self.sources + cells // CELLS]
        own = (right + SOURCE_PRIOR) / (expected + SOURCE_PRIOR)
        return np.clip(self._worth[cells] * np.minimum(own, 1.0), LEAST, MOST)

    def best(self, source: Whole, length: Whole) -> Array:
        """The same of candidates that all matches agree on, whatever the request: `[n]`."""
        return self._worth[source * CELLS + LENGTHS.searchsorted(length) * len(SHARE_GUESS) + len(SHARES)]

    def learn(self, cells: Whole, rows: Whole, right: NDArray[np.bool_], requests: int) -> None:
        """Candidates `[n]` whose turn came, and which of them the target wrote. requests: of the round."""
        fade = 0.5 ** (requests / HALF_LIFE)
        size = len(self._tried)
        self._tried = self._tried * fade + np.bincount(cells, minlength=size)
        self._right = self._right * fade + np.bincount(cells[right], minlength=size)
        own = rows * self.sources + cells // CELLS
        looks = np.bincount(own, minlength=self._own.shape[1])
        self._own *= 0.5 ** (looks / OWN_HALF_LIFE)
        self._own[0] += np.bincount(own, self._worth[cells], self._own.shape[1])
        self._own[1] += np.bincount(own[right], minlength=self._own.shape[1])
        # A class leans on its source, so that one that is wrong everywhere fades in every class at once.
        tried, hits = self._tried.reshape(self.sources, CELLS), self._right.reshape(self.sources, CELLS)
        guess = self._guess.reshape(self.sources, CELLS)
        ratio = (hits.sum(axis=1) + SOURCE_PRIOR) / ((tried * guess).sum(axis=1) + SOURCE_PRIOR)
        leaning = np.minimum(guess * np.minimum(ratio, MOST_LEAN)[:, None], MOST)
        self._worth = ((hits + PRIOR * leaning) / (tried + PRIOR)).ravel()

    def forget(self, row: int) -> None:
        """Another request has this row."""
        self._own[:, row * self.sources : (row + 1) * self.sources] = 0.0

    def report(self, names: tuple[str, ...]) -> dict[str, Any]:
        """By source, of what was seen lately: candidates whose turn came, and the share that the target wrote."""
        tried = self._tried.reshape(self.sources, CELLS).sum(axis=1)
        right = self._right.reshape(self.sources, CELLS).sum(axis=1)
        return {
            name: {"looked_at": float(t), "right": float(r / t) if t else 0.0}
            for name, t, r in zip(names, tried, right, strict=True)
        }
