"""Engines of known speeds in an event loop whose clock jumps from one event to the next: no time passes in a test."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import SamplingParams

Result = TypeVar("Result")


class _NoWait(selectors.SelectSelector):
    """Reports what is ready now, and adds the wait that was asked for to the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(work: Coroutine[Any, Any, Result]) -> tuple[Result, float]:
    """The result, and the seconds that it would have taken."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        loop = runner.get_loop()
        began = loop.time()
        return runner.run(work), loop.time() - began


class Device:
    """An engine that decodes `batch` rows at once. A round takes `round_s` and gives every row one token, so its
    rate is `batch / round_s` tokens a second when it is full. A row's `max_tokens` is its length."""

    def __init__(self, name: str, speed: float, batch: int, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.batch = batch
        self.round_s = batch / speed
        self.answered = 0
        self._waiting: list[tuple[int, RowRequest, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._running: asyncio.Task[None] | None = None
        self._steps = 0

    async def ready(self) -> None:
        await asyncio.sleep(0)

    async def generate(self, rows: list[RowRequest]) -> list[RowAnswer]:
        loop = asyncio.get_running_loop()
        done = [loop.create_future() for _ in rows]
        for row, end in zip(rows, done, strict=True):
            heapq.heappush(self._waiting, (next(self._order), row, end))
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._decode())
        await asyncio.gather(*done)
        self.answered += len(rows)
        return [RowAnswer(text=row.row_id, num_generated_tokens=row.params.max_tokens) for row in rows]

    async def _decode(self) -> None:
        left: list[tuple[int, asyncio.Future[None]]] = []
        while self._waiting or left:
            while self._waiting and len(left) < self.batch:
                _, row, end = heapq.heappop(self._waiting)
                left.append((row.params.max_tokens, end))
            await asyncio.sleep(self.round_s)
            self._steps += 1
            for tokens, end in left:
                if tokens == 1:
                    end.set_result(None)
            left = [(tokens - 1, end) for tokens, end in left if tokens > 1]

    async def pulse(self) -> int:
        return self._steps

    async def end(self) -> None:
        raise AssertionError("a working engine was taken to hang")


def row(index: int, tokens: int) -> RowRequest:
    return RowRequest(str(index), "prompt", SamplingParams(max_tokens=tokens))
