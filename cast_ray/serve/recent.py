"""Latencies and counts of the last minutes, for the live page and for `Retry-After`. Prometheus has the long run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WINDOW_S = 300.0
MOST = 4096
RETRY_AFTER = (1, 60)


@dataclass(frozen=True)
class Sample:
    """One answered request. Times in seconds; `gap` is the mean time between tokens behind the first."""

    at: float
    first_token_s: float
    total_s: float
    gap_s: float | None
    tokens: int


@dataclass
class Recent:
    """What this process answered lately."""

    clock: Callable[[], float] = time.monotonic
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MOST))
    statuses: Counter[int] = field(default_factory=Counter)
    running: int = 0

    def observe(self, first_token_s: float, total_s: float, tokens: int) -> None:
        """A request was answered in full."""
        gap = (total_s - first_token_s) / (tokens - 1) if tokens > 1 else None
        self.samples.append(Sample(self.clock(), first_token_s, total_s, gap, tokens))

    def retry_after(self) -> int:
        """Whole seconds after which a place is likely to be free: the usual length of a request."""
        usual = np.median([sample.total_s for sample in self._window()] or [1.0])
        return int(np.clip(np.ceil(usual), *RETRY_AFTER))

    def report(self) -> dict[str, Any]:
        """Percentiles in milliseconds over the last `WINDOW_S`, and counts since the start."""
        window = self._window()
        return {
            "window_s": WINDOW_S,
            "requests": len(window),
            "running": self.running,
            "tokens": sum(sample.tokens for sample in window),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "time_to_first_token_ms": _percentiles([sample.first_token_s for sample in window]),
            "time_per_token_ms": _percentiles([sample.gap_s for sample in window if sample.gap_s is not None]),
            "request_ms": _percentiles([sample.total_s for sample in window]),
        }

    def _window(self) -> list[Sample]:
        since = self.clock() - WINDOW_S
        return [sample for sample in self.samples if sample.at >= since]


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.percentile(np.array(seconds) * 1000, (50, 90, 99)).round(2).tolist()
    return dict(zip(("p50", "p90", "p99"), values, strict=True))
