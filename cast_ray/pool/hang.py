"""Whether an engine that holds rows has stopped to work. It knows no Ray, and ends nothing itself.

Life is any change: of the engine's own count of steps, or of the rows that it has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable

# Looks within one timeout: so that a hang is found little later than it has lasted that long.
_LOOKS = 8
_LONGEST_INTERVAL_S = 15.0


class HangWatch:
    """The state of one watch. Every `interval_s` either `idle` or `hangs` is to be called."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._count: int | None = None
        self._seen: Hashable = None
        self._since: float | None = None

    @property
    def interval_s(self) -> float:
        return min(_LONGEST_INTERVAL_S, self._timeout_s / _LOOKS)

    def idle(self) -> None:
        """Nothing is expected of the engine."""
        self._since = None

    async def hangs(self, pulse: Callable[[], Awaitable[int]], answered: Hashable, now: Callable[[], float]) -> bool:
        """True once neither the pulse nor `answered` has changed for the timeout. An engine that does not answer in
        time has the pulse that it had."""
        began = now()
        # Silent, or just dying: in the latter case its calls fail, and what is aboard goes elsewhere anyway.
        with contextlib.suppress(Exception):
            self._count = await asyncio.wait_for(pulse(), timeout=self.interval_s)
        state = (self._count, answered)
        if self._since is None or state != self._seen:
            self._seen, self._since = state, began
            return False
        return now() - self._since >= self._timeout_s
