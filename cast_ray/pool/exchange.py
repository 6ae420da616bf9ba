"""Finished outputs handed round between the engines of a pool, so that each can look up what the others' rows wrote.

In modest batches: every few seconds, the latest outputs only. What does not get through is lost, and costs speed alone.
It does not know Ray; nor what an engine does with what it gets.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

# A finished output as `drafters.lookup` has it: scope, the tokens before it, its own.
Output = tuple[str, tuple[int, ...], tuple[int, ...]]
# Gives an engine what the others wrote and returns what it has written since. May raise: then it is asked again later.
Port = Callable[[list[Output]], list[Output]]

PERIOD_S = 2.0
# Tokens that wait for one engine at most; the oldest outputs give way.
MOST_WAITING = 16_384
logger = logging.getLogger(__name__)


class Exchange:
    """Rounds over the engines in a thread of its own, until `close`. ports: asked each time; engines come and go."""

    def __init__(self, ports: Callable[[], Mapping[str, Port]], period_s: float = PERIOD_S) -> None:
        self._ports = ports
        self._period_s = period_s
        self._waiting: dict[str, deque[Output]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cast-ray-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No further round begins. One under way ends by itself."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            try:
                self.round(self._ports())
            except Exception as error:  # the pool's members change under it: the next round sees them as they are
                logger.debug("no exchange: %s", type(error).__name__)

    def round(self, ports: Mapping[str, Port]) -> None:
        """Ask every engine once. Nobody gets its own outputs back."""
        self._waiting = {name: self._waiting.get(name, deque()) for name in ports}
        for name, port in ports.items():
            sent = list(self._waiting[name])
            try:
                written = port(sent)
            except Exception as error:  # it died, restarts or is busy loading: others go on
                logger.debug("no exchange with %s: %s", name, type(error).__name__)
                continue
            self._waiting[name].clear()
            for other, waiting in self._waiting.items():
                if other != name:
                    waiting.extend(written)
                    _cut(waiting)


def _cut(waiting: deque[Output]) -> None:
    tokens = sum(map(_size, waiting))
    while tokens > MOST_WAITING:
        tokens -= _size(waiting.popleft())


def _size(output: Output) -> int:
    return len(output[1]) + len(output[2])
