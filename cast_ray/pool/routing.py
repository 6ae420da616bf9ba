"""Which engine gets the next rows: the one predicted to finish them first. Pure arithmetic, no Ray and no clock.

predicted finish = (expected tokens aboard + expected tokens of the row) / measured tokens per second
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class RateMeter:
    """Tokens a second while busy. Idle time does not count, and work one half-life of busy time ago counts half."""

    half_life_s: float = 30.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _last: float | None = None

    def advance(self, now: float, busy: bool, tokens: int = 0) -> None:
        """The time since the last call was spent busy or not; `tokens` were finished just now."""
        if busy and self._last is not None and now > self._last:
            elapsed = now - self._last
            fade = 0.5 ** (elapsed / self.half_life_s)
            self._tokens *= fade
            self._seconds = self._seconds * fade + elapsed
        self._last = now
        self._tokens += tokens

    @property
    def tokens_per_s(self) -> float | None:
        """None until there is something to go by."""
        return self._tokens / self._seconds if self._seconds > 0 and self._tokens > 0 else None


@dataclass
class EngineLoad:
    """What is known of one engine: rows it may hold, rows and expected tokens aboard, rows answered, and its rate."""

    slots: int
    rows: int = 0
    finished: int = 0
    tokens: float = 0.0
    meter: RateMeter = field(default_factory=RateMeter)

    @property
    def free(self) -> int:
        return max(0, self.slots - self.rows)


def choose(loads: Sequence[EngineLoad], tokens: float) -> int | None:
    """Index of the engine with a free slot that is predicted to finish a row of `tokens` first; None if none is free.

    An engine not yet measured is taken to be as fast as the mean of the others. Ties go to fewer rows, then the first.
    """
    known = [rate for load in loads if (rate := load.meter.tokens_per_s) is not None]
    usual = sum(known) / len(known) if known else 1.0
    best, best_key = None, (math.inf, math.inf)
    for index, load in enumerate(loads):
        if load.free:
            key = ((load.tokens + tokens) / (load.meter.tokens_per_s or usual), load.rows)
            if key < best_key:
                best, best_key = index, key
    return best


def better_held(load: EngineLoad, others: Sequence[EngineLoad], tokens: float, queued: float) -> bool:
    """Whether a row of `tokens` is better left in the queue than given to the engine of `load`.

    So it is where the other engines are predicted to finish all they hold, and all of the queue (`queued` tokens, this
    row among them), before that engine would have finished the row. In a long queue that is never so; at the end it
    keeps a slow engine from making everyone wait for its last row.
    """
    rate = load.meter.tokens_per_s
    rates = [other.meter.tokens_per_s for other in others]
    known = [found for found in rates if found is not None]
    if rate is None or not known or not any(other.rows for other in others):
        return False
    aboard = sum(other.tokens for other, found in zip(others, rates, strict=True) if found is not None)
    return (load.tokens + tokens) / rate > (aboard + queued) / sum(known)


@dataclass
class TokenEstimate:
    """Tokens that a row is expected to generate: the mean of the rows so far, never above its own limit."""

    rows: int = 0
    tokens: int = 0

    def observe(self, tokens: int) -> None:
        self.rows += 1
        self.tokens += tokens

    def expect(self, limit: int) -> float:
        return min(limit, max(1.0, self.tokens / self.rows)) if self.rows else limit
