"""Tokens a second of single requests, as they were answered lately. Plain arithmetic."""

from __future__ import annotations

import time
from dataclasses import dataclass

# A request so many requests ago counts half.
HALF_LIFE = 8.0
# Nothing that old says how fast a replica is: one that was slow once must get another chance.
STALE_S = 60.0


@dataclass
class Pace:
    """Observed requests, later ones more."""

    tokens: float = 0.0
    seconds: float = 0.0
    at: float = float("-inf")

    def observe(self, tokens: int, seconds: float) -> None:
        """A request of `tokens` was answered; `seconds` went by from its first round to its last."""
        if tokens < 2 or seconds <= 0:
            return
        fade = 0.5 ** (1 / HALF_LIFE)
        # The first token came with the prompt's reading.
        self.tokens = self.tokens * fade + tokens - 1
        self.seconds = self.seconds * fade + seconds
        self.at = time.monotonic()

    def tokens_per_s(self, now: float) -> float | None:
        """None where there is nothing to go by, or nothing recent."""
        if not self.seconds or now - self.at > STALE_S:
            return None
        return self.tokens / self.seconds
