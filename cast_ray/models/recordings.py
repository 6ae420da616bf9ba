"""Captured functions by their shapes, made when a shape is first met and within limits that are said when reached.

What is captured is the caller's business (`models.graphs`, `drafters.graphs`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Recording = TypeVar("Recording")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """seconds: what recording ahead of need may take. most: recordings kept. bytes: device memory they may take."""

    seconds: float = 20.0
    most: int = 256
    bytes: int = 4 << 30


class Recordings(Generic[Recording]):
    """See the module.

    name: of what is captured, in messages. off: why there will be no more, None while there may be.
    """

    def __init__(self, name: str, device: torch.device, limits: Limits) -> None:
        self.name = name
        self.off: str | None = None
        self._device = device
        self._limits = limits
        self._known: dict[Hashable, Recording] = {}
        self._bytes = 0
        self._ms = 0.0
        self._hits = self._misses = 0

    @property
    def usable(self) -> bool:
        """Whether asking can bring anything."""
        return self.off is None or bool(self._known)

    def find(self, key: Hashable, make: Callable[[], Recording]) -> Recording | None:
        """The recording of a key, made now where it is new; None where it is to run eagerly."""
        known = self._known.get(key)
        if known is None and self.off is None:
            known = self._record(key, make)
        if known is None:
            self._misses += 1
        else:
            self._hits += 1
        return known

    def ahead(self, wanted: Iterable[tuple[Hashable, Callable[[], Recording]]]) -> None:
        """Record these in their order until the time is up, which is said in the log."""
        deadline = time.perf_counter() + self._limits.seconds
        listed = list(wanted)
        for place, (key, make) in enumerate(listed):
            if self.off is not None:
                return
            if time.perf_counter() > deadline:
                problem = "%s: %d of %d sizes recorded in %.0f s; others are when they are first met"
                logger.info(problem, self.name, place, len(listed), self._limits.seconds)
                return
            if key not in self._known:
                self._record(key, make)

    def report(self) -> dict[str, Any]:
        """Plain values: what there is, what it took, how often it was used."""
        return {
            "recorded": len(self._known),
            "bytes": self._bytes,
            "ms": self._ms,
            "replays": self._hits,
            "eager": self._misses,
            "off": self.off,
        }

    def _record(self, key: Hashable, make: Callable[[], Recording]) -> Recording | None:
        if len(self._known) >= self._limits.most or self._bytes >= self._limits.bytes:
            self.off = f"{len(self._known)} recordings in {self._bytes >> 20} MiB are as many as are allowed"
            logger.info("%s: %s; other sizes run eagerly", self.name, self.off)
            return None
        began, before = time.perf_counter(), self._reserved()
        try:
            recording = make()
        except Exception as error:
            # Kernels, libraries and models fail here in many ways, and the eager path does without any of it. What one
            # size asks for the others do too: a layer whose shapes depend on values, a kernel that waits.
            self.off = f"cannot be recorded ({error})"
            logger.warning("%s: %s; it runs eagerly", self.name, self.off)
            return None
        self._ms += (time.perf_counter() - began) * 1000
        self._bytes += max(0, self._reserved() - before)
        self._known[key] = recording
        return recording

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
