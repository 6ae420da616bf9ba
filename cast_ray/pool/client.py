"""A client of a running pool: picklable members, and a dispatcher in a thread of its own.

Any process of the cluster may hold one. It starts and ends no actor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from cast_ray.pool.dispatch import Dispatcher
from cast_ray.pool.rows import RowAnswer, RowRequest


@dataclass(frozen=True)
class PoolMembers:
    """Handles to the engine actors of a pool, as they travel to a client.

    slots: rows that a client keeps aboard each engine. max_deaths: engines that a row may go down with.
    hang_timeout_s: longest that an engine with rows aboard may make no progress before it is ended; None: for ever.
    """

    names: tuple[str, ...]
    handles: tuple[Any, ...]
    slots: tuple[int, ...]
    max_deaths: int
    hang_timeout_s: float | None = None

    def client(self) -> PoolClient:
        """A client of the pool."""
        return PoolClient(self)


class ActorPort:
    """An engine actor as the dispatcher sees it."""

    def __init__(self, name: str, handle: Any, slots: int) -> None:
        self.name = name
        self.slots = slots
        self._handle = handle

    async def ready(self) -> None:
        # Retried, because Ray may be restarting the actor; ends with ActorDiedError when its restarts are used up.
        await self._handle.ready.options(max_task_retries=-1).remote()

    async def generate(self, rows: list[RowRequest]) -> list[RowAnswer]:
        return await self._handle.generate_batch.remote(rows)

    async def pulse(self) -> int:
        return await self._handle.pulse.remote()

    async def end(self) -> None:
        # Ray starts it again, as after any other death. In a thread, since it asks the cluster's head.
        await asyncio.to_thread(ray.kill, self._handle, no_restart=False)


class PoolClient:
    """Rows in, answers out, from any thread or event loop."""

    def __init__(self, members: PoolMembers) -> None:
        ports = [ActorPort(*one) for one in zip(members.names, members.handles, members.slots, strict=True)]
        self._dispatcher = Dispatcher(ports, members.max_deaths, members.hang_timeout_s)
        # A loop of its own: Ray Data blocks the loop of an async stage while its output waits for a reader, and the
        # engines must be fed meanwhile.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="cast-ray-pool-client", daemon=True).start()

    async def generate(self, rows: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answers in the order of rows. Raises EngineError when no engine is left."""
        work = asyncio.run_coroutine_threadsafe(self._dispatcher.generate(rows), self._loop)
        return await asyncio.wrap_future(work)
