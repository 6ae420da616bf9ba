"""The Ray actor around one engine: load it, generate for rows, tell how it does.

It decides nothing about routing or retries. A row that the engine refuses becomes that row's error; only the engine's
own death leaves a call as an exception.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from cast_ray.config import EngineConfig
from cast_ray.errors import EngineError, QueueFullError, RequestError
from cast_ray.pool.exchange import Output
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import Completion, Prompt, SamplingParams
from cast_ray.stats.counters import RowCounters


class EngineLike(Protocol):
    """What the actor needs of an engine; `engine.async_engine.AsyncEngine` is the one in the product."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str) -> Completion: ...

    def stats(self) -> dict[str, Any]: ...

    @property
    def healthy(self) -> bool: ...

    def close(self) -> None: ...


@runtime_checkable
class Exchanging(Protocol):
    """An engine that looks up candidates in finished outputs."""

    def exchange_outputs(self, others: list[Output]) -> list[Output]: ...


# From the death of an engine to the end of its process: time for the calls aboard to fail with the reason.
FAREWELL_S = 0.2

# A row that finds the engine's queue full waits so long, then twice as long, up to the last.
QUEUE_PAUSES_S = (0.02, 1.0)

# Longest wait for the engine's statistics when only its pulse is asked for.
PULSE_S = 1.0

EngineFactory = Callable[[EngineConfig], EngineLike]


def default_engine(config: EngineConfig) -> EngineLike:
    """The real engine. Imported here, so that a driver that only routes rows never loads torch."""
    from cast_ray.engine.async_engine import AsyncEngine

    # A pool is one job's: every row may be looked up in for later ones.
    return AsyncEngine(config, lookup_scope="job")


class EngineActor:
    """One engine in one process. The engine loads in `ready`, so that a failure to load arrives as a plain exception
    with its own message, and so that an actor restarted by Ray loads again when it is asked whether it is ready."""

    def __init__(self, name: str, config: EngineConfig, factory: EngineFactory, group: str = "engine") -> None:
        self._name = name
        self._group = group
        self._config = config
        self._factory = factory
        self._engine: EngineLike | None = None
        self._loading = asyncio.Lock()
        self._requests = itertools.count()
        self._ending = False
        self._aboard = 0
        self._rows = RowCounters()
        self._metrics: Any = None
        self._look: asyncio.Task[dict[str, Any]] | None = None
        self._steps = 0

    async def ready(self) -> str:
        """Load the engine if it is not loaded, and return the actor's name. Raises what loading raised."""
        if self._ending:
            await asyncio.Event().wait()  # until the process ends, and Ray asks the next one
        async with self._loading:
            if self._engine is None:
                # In a thread: loading takes seconds, and `stats` should answer meanwhile.
                self._engine = await asyncio.to_thread(self._factory, self._config)
                self._metrics = _metrics(self._group, self._name)
        return self._name

    async def generate_batch(self, rows: list[RowRequest]) -> list[RowAnswer]:
        """Answers in the order of rows. Raises EngineError only when the engine itself is dead."""
        await self.ready()
        self._aboard += len(rows)
        try:
            return list(await asyncio.gather(*(self._counted(row) for row in rows)))
        finally:
            self._aboard -= len(rows)

    async def _counted(self, row: RowRequest) -> RowAnswer:
        began = time.monotonic()
        answer = await self._answer(row)
        seconds = time.monotonic() - began
        tokens, rounds = answer.num_generated_tokens or 0, answer.rounds or 0
        kind = answer.error.split(":", 1)[0] if answer.error is not None else None
        if kind is None:
            self._rows.answer(tokens, rounds, seconds)
        else:
            self._rows.fail(kind)
        if self._metrics is not None:
            prompt = answer.num_input_tokens or 0
            self._metrics.observe_row(kind or "ok", seconds, prompt_tokens=prompt, tokens=tokens, rounds=rounds)
        return answer

    async def _answer(self, row: RowRequest) -> RowAnswer:
        assert self._engine is not None
        # Numbered, because a row that is tried again may still be in the engine.
        request_id = f"{row.row_id}#{next(self._requests)}"
        try:
            completion = await self._generate(self._engine, row, request_id)
            if self._metrics is not None and completion.token_ids:
                self._metrics.observe_first_token(completion.stats.time_to_first_token_ms / 1000)
            return RowAnswer.of(completion)
        except RequestError as error:
            return RowAnswer.failed("RequestError", error)
        except Exception as error:
            if not self._engine.healthy:
                self._end_process()
                raise EngineError(f"the engine of {self._name} died ({type(error).__name__}: {error})") from None
            # Whatever one row provokes, for example in a chat template, must not harm its neighbours.
            return RowAnswer.failed(type(error).__name__, error)

    async def _generate(self, engine: EngineLike, row: RowRequest, request_id: str) -> Completion:
        """The engine's answer. A full queue is no fault of the row: it is sent again until there is room."""
        pause, longest = QUEUE_PAUSES_S
        while True:
            try:
                return await engine.generate(row.prompt, row.params, request_id=request_id)
            except QueueFullError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    def _end_process(self) -> None:
        """A dead engine may leave its device in any state, so Ray is to start a new process. The calls that wait for
        this one are first told why."""
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_later(FAREWELL_S, os._exit, 1)

    async def stats(self) -> dict[str, Any]:
        """Name, group, process, node, rows aboard, what became of rows, and the engine's own statistics (None while it
        loads)."""
        import ray

        context = ray.get_runtime_context()
        return {
            "name": self._name,
            "group": self._group,
            "pid": os.getpid(),
            "node": context.get_node_id(),
            "restarted": context.was_current_actor_reconstructed,
            "aboard": self._aboard,
            "rows": self._rows.to_dict(),
            "engine": await self._ask_engine() if self._engine is not None else None,
        }

    async def exchange(self, others: list[Output]) -> list[Output]:
        """Outputs of the pool's other engines for this one's lookup, and back what it has finished since. Nothing while
        it loads."""
        engine = self._engine
        if engine is None or not isinstance(engine, Exchanging):
            return []
        # In a thread: an engine answers between two rounds.
        return await asyncio.to_thread(engine.exchange_outputs, others)

    async def pulse(self) -> int:
        """The engine's count of steps when it last told it. Returns within `PULSE_S` even from an engine that is
        stuck, whose count then stays."""
        if self._engine is not None:
            await asyncio.wait({asyncio.ensure_future(self._ask_engine())}, timeout=PULSE_S)
        return self._steps

    async def _ask_engine(self) -> dict[str, Any]:
        """The engine's statistics. One question at a time, however many ask: one that is stuck would else take a
        thread for each."""
        if self._look is None or self._look.done():
            assert self._engine is not None
            # In a thread: an engine answers between two rounds.
            self._look = asyncio.ensure_future(asyncio.to_thread(self._engine.stats))
        found = await asyncio.shield(self._look)
        self._steps = found.get("steps", 0)
        if self._metrics is not None:
            self._metrics.observe_engine(found)
        return found

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
            self._engine = None


def _metrics(group: str, name: str) -> Any:
    """The actor's Prometheus series; None outside a Ray worker, where no port shows them."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from cast_ray.stats.metrics import EngineMetrics

    return EngineMetrics(group, name)
