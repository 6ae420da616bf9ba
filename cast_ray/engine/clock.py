"""Where the time of a round goes, on the host's clock."""

from __future__ import annotations

import time
from collections import defaultdict


class Clock:
    """Wall ms by stage; a stage may have several laps. Nothing is waited for: a stage on a device is its launch."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to `stage`."""
        now = time.perf_counter()
        self.ms[stage] += (now - self._last) * 1000
        self._last = now
