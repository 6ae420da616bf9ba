"""The texts that lookup looks in: one place a running request for its own, and a ring of what finished requests wrote.

Bounded from the start: a new text takes the place of a request that has gone, or of the oldest output in the ring.
Outputs are kept by scope, and one scope never finds another's. Nothing here guesses what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cast_ray.drafters.suffix import LONGEST, NOTHING, Matches, SuffixIndex, Tokens, Whole

# Longest part of one finished output that is kept, as a share of the ring, so that no output drives out all others.
LARGEST_SHARE = 8
# Scopes that are told apart; the one not used for the longest time is forgotten first, and with it all that it kept.
MOST_SCOPES = 65_536


class TextStore:
    """See the module.

    rows: requests that run at once. own_tokens: longest text of one of them that is looked in. kept_tokens: of
    finished outputs, all scopes together; 0 keeps none.
    """

    def __init__(self, rows: int, own_tokens: int, kept_tokens: int) -> None:
        self.own_tokens = own_tokens
        self._stride = own_tokens + LONGEST
        self._ring = rows * self._stride + LONGEST  # behind a gap of nothing, like every text
        self._kept = kept_tokens
        self.index = SuffixIndex(self._ring + kept_tokens, max(kept_tokens, min(rows * own_tokens, 1 << 18)))
        self._owners: Tokens = np.zeros(kept_tokens, dtype=np.int32)
        self._next = 0  # place in the ring
        self._scopes: dict[str, int] = {}
        self._last_scope = 0
        self.outputs = 0

    @property
    def bytes(self) -> int:
        """Memory when it is full."""
        return self.index.bytes + self._owners.nbytes

    def start_of(self, rows: Whole) -> Whole:
        """Positions of the first tokens of these rows' texts."""
        return rows * self._stride + LONGEST

    def clear(self, row: int) -> None:
        """The row's text is another request's from now on."""
        start = row * self._stride
        self.index.tokens[start : start + self._stride] = NOTHING

    def write(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Append to texts of running requests: (row, tokens that it has already, new tokens), which fit."""
        if not pieces:
            return
        starts = [row * self._stride + LONGEST + length for row, length, _ in pieces]
        positions = np.concatenate(
            [np.arange(start, start + len(new)) for start, (_, _, new) in zip(starts, pieces, strict=True)]
        )
        self.index.tokens[positions] = np.concatenate([np.asarray(new, dtype=np.int32) for _, _, new in pieces]) + 1
        self.index.add(positions, positions // self._stride)

    def scope(self, name: str) -> int:
        """The number of a scope, which outputs of its name are kept under; above 0."""
        number = self._scopes.pop(name, 0)
        if not number:
            self._last_scope = number = self._last_scope + 1
            if len(self._scopes) >= MOST_SCOPES:
                del self._scopes[next(iter(self._scopes))]
        self._scopes[name] = number
        return number

    def keep(self, scope: int, lead: Sequence[int], output: Sequence[int]) -> None:
        """Put a finished output into the ring, in place of the oldest. lead: the tokens before it, to be found by."""
        text = np.asarray([*lead, *output][: self._kept // LARGEST_SHARE], dtype=np.int32) + 1
        if not len(output) or len(text) < 2:
            return
        # A gap behind it: what is left there of an older output does not go on where this one ends.
        if self._next + len(text) + 1 > self._kept:
            self.index.tokens[self._ring + self._next :] = NOTHING
            self._next = 0
        start = self._ring + self._next
        self.index.tokens[start : start + len(text)] = text
        self.index.tokens[start + len(text)] = NOTHING
        self._owners[self._next : self._next + len(text)] = scope
        positions = np.arange(start, start + len(text))
        self.index.add(positions, np.full(len(text), self._salt(scope)))
        self._next += len(text) + 1
        self.outputs += 1

    def find(self, rows: Whole, lengths: Whole, scopes: Whole) -> tuple[Matches, Tokens]:
        """Earlier places at which the last tokens of these rows' texts stand, `query` being their index among the rows.

        lengths: `[B]`, tokens of each text. scopes: `[B]`, 0 for a request that shares nothing.
        Also whether each is in the ring, `[M]` bool.
        """
        ends = self.start_of(rows) + lengths - 1
        # Without a ring nobody shares.
        sharing = scopes.nonzero()[0] if self._kept else rows[:0]
        queries = np.concatenate([np.arange(len(rows)), sharing])
        salts = np.concatenate([rows, self._salt(scopes[sharing])])
        found = self.index.find(ends[queries], salts)
        query, at = queries[found.query], found.at
        kept = found.query >= len(rows)
        mine = (at >= self.start_of(rows)[query]) & (at < ends[query])
        if kept.any():
            places = np.maximum(at - self._ring, 0)
            mine = np.where(kept, (at >= self._ring) & (self._owners[places] == scopes[query]), mine)
        chosen = mine.nonzero()[0]
        return Matches(query[chosen], at[chosen], found.lengths[chosen]), kept[chosen]

    def _salt(self, scope: Whole | int) -> Whole:
        return np.asarray(scope, dtype=np.int64) + (1 << 32)
