"""Where the last tokens of a text occurred before: hash chains over one flat array of tokens, as LZ77 coders have them.

For each of a few lengths, every position is chained to the last earlier one that ends on (as a rule) the same n-gram.
What a chain finds is compared token by token, so a collision of hashes costs time and never gives a false match. All
calls work on many positions at once. Who owns which part of the array is `store`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
Tokens = NDArray[np.int32]

# Lengths of the n-grams that are chained. A short one finds much and says little; a long one finds the place that a
# short one's chain, cut at its newest links, has long passed.
LEVELS = (2, 4, 8)
# Links followed in each chain.
LINKS = 10
# Tokens that a match is followed back at most. Every text has as many places before its first token that match nothing.
LONGEST = 32
# No token: what lies before, between and behind texts. Token t is stored as t + 1.
NOTHING = 0

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BACK = np.arange(LONGEST)
# A random odd factor for the token i places back, from its own bits: two orders of the same tokens differ.
_FACTORS = (np.arange(1, LEVELS[-1] + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)) | np.uint64(1)
_LENGTHS = np.array(LEVELS)
_ENDS = _LENGTHS - 1
# Matches that end sooner than the next level's length are this level's; the rest are found by that one.
_NEXT = np.array([*LEVELS[1:], LONGEST + 1])


@dataclass(frozen=True)
class Matches:
    """M earlier places at which a query's last tokens stand too.

    query: [M] int64, which of the queries. at: [M] int64, position of the last token that matches. lengths: [M] int64,
    tokens that match there, 2..LONGEST.
    """

    query: Whole
    at: Whole
    lengths: Whole


class SuffixIndex:
    """Chains over `size` positions; `tokens` is written by the caller before `add`. 16 bytes a position, 12 a bucket.

    buckets: heads of chains a level, rounded up to a power of two.
    """

    def __init__(self, size: int, buckets: int) -> None:
        bits = max(8, (buckets - 1).bit_length())
        # Memory that no token has reached yet is not touched, so it is not taken either.
        self.tokens: Tokens = np.zeros(size, dtype=np.int32)
        self._before: Tokens = np.zeros(len(LEVELS) * size, dtype=np.int32)
        self._heads: Tokens = np.zeros(len(LEVELS) << bits, dtype=np.int32)
        self._shift = np.uint64(64 - bits)
        self._tables = np.arange(len(LEVELS), dtype=np.int64) << bits
        self._places = np.arange(len(LEVELS), dtype=np.int64) * size

    @property
    def bytes(self) -> int:
        """Memory of the arrays when all of it is in use."""
        return self.tokens.nbytes + self._before.nbytes + self._heads.nbytes

    def add(self, positions: Whole, salts: Whole) -> None:
        """Chain positions `[T]`, ascending within a text. salts: `[T]`, which texts find each other."""
        buckets = self._buckets(positions, salts).ravel()
        places = (positions[:, None] + self._places).ravel()
        order = buckets.argsort(kind="stable")
        buckets, places = buckets[order], places[order]
        first = np.empty(len(buckets), dtype=bool)
        first[:1] = True
        np.not_equal(buckets[1:], buckets[:-1], out=first[1:])
        before = np.empty_like(places)
        before[1:] = places[:-1]
        before[first] = self._heads[buckets[first]]
        self._before[places] = before
        last = np.append(first[1:], True)
        self._heads[buckets[last]] = places[last]

    def find(self, ends: Whole, salts: Whole) -> Matches:
        """Matches of the texts that end at positions `[Q]`, each among the texts of its own salt `[Q]`.

        The text itself may be among them; a place overwritten since may belong to anybody: the caller looks at that.
        """
        found = np.empty((LINKS, len(ends), len(LEVELS)), dtype=np.int64)
        found[0] = self._heads[self._buckets(ends, salts)]
        for link in range(1, LINKS):
            found[link] = self._before[found[link - 1]]
        at = np.maximum(found - self._places, 0)
        # Position 0 is never a token's: the end of a chain. Most of what collides differs in the last token already.
        _, query, level = found_at = ((at > 0) & (self.tokens[at] == self.tokens[ends][:, None])).nonzero()
        at = at[found_at]
        there, here = self.tokens[at[:, None] - _BACK], self.tokens[ends[query][:, None] - _BACK]
        # Before the first tokens of both texts there is nothing, which is no match.
        same = (there == here) & (there != NOTHING)
        lengths = np.where(same.all(axis=1), LONGEST, same.argmin(axis=1))
        kept = ((lengths >= _LENGTHS[level]) & (lengths < _NEXT[level])).nonzero()[0]
        return Matches(query[kept], at[kept], lengths[kept])

    def _buckets(self, positions: Whole, salts: Whole) -> Whole:
        """Heads of the chains of the n-grams that end at positions `[T]`: `[T, levels]`."""
        window = self.tokens[positions[:, None] - _BACK[: len(_FACTORS)]].astype(np.uint64)
        sums = (window * _FACTORS).cumsum(axis=1)[:, _ENDS] + (salts.astype(np.uint64) * _GOLDEN)[:, None]
        # Multiplied twice, with the high bits folded in between: one product leaves neighbours side by side.
        mixed = (sums ^ (sums >> np.uint64(29))) * _GOLDEN
        return (mixed >> self._shift).astype(np.int64) + self._tables
