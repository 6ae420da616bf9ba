"""The Ray actor around one engine: load it, generate for rows, tell how it does.

It decides nothing about routing or retries. A row that the engine refuses becomes that row's error; only the engine's
own death leaves a call as an exception.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any, Protocol

from cast_ray.config import EngineConfig
from cast_ray.errors import EngineError, RequestError
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import Completion, Prompt, SamplingParams


class EngineLike(Protocol):
    """What the actor needs of an engine; `engine.async_engine.AsyncEngine` is the one in the product."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str) -> Completion: ...

    def stats(self) -> dict[str, Any]: ...

    @property
    def healthy(self) -> bool: ...

    def close(self) -> None: ...


# From the death of an engine to the end of its process: time for the calls aboard to fail with the reason.
FAREWELL_S = 0.2

EngineFactory = Callable[[EngineConfig], EngineLike]


def default_engine(config: EngineConfig) -> EngineLike:
    """The real engine. Imported here, so that a driver that only routes rows never loads torch."""
    from cast_ray.engine.async_engine import AsyncEngine

    return AsyncEngine(config)


class EngineActor:
    """One engine in one process. The engine loads in `ready`, so that a failure to load arrives as a plain exception
    with its own message, and so that an actor restarted by Ray loads again when it is asked whether it is ready."""

    def __init__(self, name: str, config: EngineConfig, factory: EngineFactory) -> None:
        self._name = name
        self._config = config
        self._factory = factory
        self._engine: EngineLike | None = None
        self._loading = asyncio.Lock()
        self._requests = itertools.count()
        self._ending = False

    async def ready(self) -> str:
        """Load the engine if it is not loaded, and return the actor's name. Raises what loading raised."""
        if self._ending:
            await asyncio.Event().wait()  # until the process ends, and Ray asks the next one
        async with self._loading:
            if self._engine is None:
                # In a thread: loading takes seconds, and `stats` should answer meanwhile.
                self._engine = await asyncio.to_thread(self._factory, self._config)
        return self._name

    async def generate_batch(self, rows: list[RowRequest]) -> list[RowAnswer]:
        """Answers in the order of rows. Raises EngineError only when the engine itself is dead."""
        await self.ready()
        return list(await asyncio.gather(*(self._answer(row) for row in rows)))

    async def _answer(self, row: RowRequest) -> RowAnswer:
        assert self._engine is not None
        # Numbered, because a row that is tried again may still be in the engine.
        request_id = f"{row.row_id}#{next(self._requests)}"
        try:
            return RowAnswer.of(await self._engine.generate(row.prompt, row.params, request_id=request_id))
        except RequestError as error:
            return RowAnswer.failed("RequestError", error)
        except Exception as error:
            if not self._engine.healthy:
                self._end_process()
                raise EngineError(f"the engine of {self._name} died ({type(error).__name__}: {error})") from None
            # Whatever one row provokes, for example in a chat template, must not harm its neighbours.
            return RowAnswer.failed(type(error).__name__, error)

    def _end_process(self) -> None:
        """A dead engine may leave its device in any state, so Ray is to start a new process. The calls that wait for
        this one are first told why."""
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_later(FAREWELL_S, os._exit, 1)

    async def stats(self) -> dict[str, Any]:
        """Name, process, node, and the engine's own statistics (None while it loads)."""
        import ray

        context = ray.get_runtime_context()
        return {
            "name": self._name,
            "pid": os.getpid(),
            "node": context.get_node_id(),
            "restarted": context.was_current_actor_reconstructed,
            # In a thread: an engine answers between two rounds.
            "engine": await asyncio.to_thread(self._engine.stats) if self._engine is not None else None,
        }

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
            self._engine = None
