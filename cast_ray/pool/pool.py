"""EnginePool: starts engine actors on a Ray cluster, waits until they can work, gathers their statistics, ends them.

It runs in the driver. Rows do not pass through it: they go from a PoolClient to the actors directly.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import ray

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import CastRayError, EngineError
from cast_ray.pool.actor import EngineActor, EngineFactory, default_engine
from cast_ray.pool.client import PoolMembers
from cast_ray.pool.cluster import cluster_nodes
from cast_ray.pool.dispatch import short_cause
from cast_ray.pool.exchange import Exchange, Output, Port
from cast_ray.pool.placement import place

# Longest wait for one engine's finished outputs.
EXCHANGE_S = 5.0


class EnginePool:
    """The engine actors of one job.

    failed: actors that did not start, by name, and why. warnings: what the plan had to give up.
    Raises from the constructor, with all actors ended: the engines' own error when none of them started and all say the
    like (a missing model, a bad drafter), EngineError when none was ready within `pool.startup_timeout_s`.
    """

    def __init__(self, engine: EngineConfig, pool: PoolConfig, factory: EngineFactory = default_engine) -> None:
        plan = place(engine, pool, cluster_nodes())
        self._config = pool
        self._plans = {actor.name: actor for actor in plan.actors}
        self.warnings = plan.warnings
        self.failed: dict[str, str] = {}
        self._causes: list[Exception] = []
        self._looking = threading.Lock()
        self._exchange: Exchange | None = None
        actor = ray.remote(EngineActor)
        self._handles: dict[str, Any] = {
            name: actor.options(
                max_restarts=pool.max_restarts, max_task_retries=0, max_concurrency=10_000, **about.options
            ).remote(name, about.engine, factory, about.group)
            for name, about in self._plans.items()
        }
        self._starting = {
            handle.ready.options(max_task_retries=-1).remote(): name for name, handle in self._handles.items()
        }
        try:
            self._await_ready()
        except BaseException:
            self.shutdown()
            raise
        if sum(_looks_up(about.engine) for about in plan.actors) > 1:
            self._exchange = Exchange(self._ports)

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def capacity(self) -> int:
        """Rows that a client keeps aboard all engines together."""
        return sum(_slots(self._plans[name].engine) for name in self._handles)

    @property
    def members(self) -> PoolMembers:
        """What a PoolClient needs, in any process of the cluster. Actors still loading are members too, and so are
        those that wait for room: they get rows once they are ready."""
        return PoolMembers(
            tuple(self._handles),
            tuple(self._handles.values()),
            tuple(_slots(self._plans[name].engine) for name in self._handles),
            self._config.row_attempts,
            self._config.hang_timeout_s,
        )

    def _await_ready(self) -> None:
        """Wait for the actors that the job needs, and for the first one; then as long again for the others. Later ones
        join while the job runs, and those that only may come are not waited for."""
        began = time.monotonic()
        deadline = began + self._config.startup_timeout_s
        graced = False
        while (left := deadline - time.monotonic()) > 0:
            waited = [self._plans[name] for name in self._starting.values() if not self._plans[name].optional]
            ready = len(self._handles) - len(self._starting)
            if not self._starting or (ready and not waited):
                break
            if ready and not graced and not any(actor.needed for actor in waited):
                graced = True
                deadline = min(deadline, time.monotonic() + (time.monotonic() - began))
                continue
            self._take_started(left)
        if len(self._handles) > len(self._starting):
            self._warn_of_absent()
            return
        raise self._none_started()

    def _take_started(self, timeout_s: float) -> None:
        """Note the actors that have become ready or failed; waits for the first one for at most `timeout_s`."""
        if not self._starting:
            return
        done, _ = ray.wait(list(self._starting), num_returns=1, timeout=timeout_s)
        if done:
            done, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for ref in done:
            name = self._starting.pop(ref)
            try:
                ray.get(ref)
            except Exception as error:
                self._causes.append(error)
                self.failed[name] = short_cause(error)
                ray.kill(self._handles.pop(name))

    def _warn_of_absent(self) -> None:
        absent = [name for name in self._starting.values() if self._plans[name].needed]
        if absent:
            self.warnings.append(
                f"{', '.join(absent)} not ready within {self._config.startup_timeout_s:g} s; the job begins without"
            )

    def _none_started(self) -> Exception:
        failed = "; ".join(f"{name}: {text}" for name, text in self.failed.items())
        if self._starting:
            waited = f"{self._config.startup_timeout_s:g} s ({len(self._starting)} still starting; "
            return EngineError(
                f"no engine actor was ready within {waited}failed: {failed or 'none'}). "
                "Look at `ray status` for missing resources, or raise pool.startup_timeout_s"
            )
        cause = getattr(self._causes[0], "cause", None)
        if isinstance(cause, CastRayError):
            return cause
        return EngineError(f"no engine actor started ({failed}). See the logs of those actors in Ray's session folder")

    def stats(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """The actors' statistics by name; one that failed, waits for room, is dead or silent has `cause` and no
        `engine`."""
        with self._looking:
            self._take_started(0)
            waiting = set(self._starting.values())
            refs = {name: handle.stats.remote() for name, handle in self._handles.items() if name not in waiting}
        if refs:
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
        found = {name: self._silent(name, text) for name, text in self.failed.items()}
        found |= {name: self._silent(name, "no room yet, or still loading", "starting") for name in waiting}
        for name, ref in refs.items():
            try:
                found[name] = ray.get(ref, timeout=0)
            except Exception as error:
                found[name] = self._silent(name, short_cause(error))
        return {name: found[name] for name in self._plans if name in found}

    def _silent(self, name: str, cause: str, state: str = "lost") -> dict[str, Any]:
        return {"name": name, "group": self._plans[name].group, "engine": None, "cause": cause, "state": state}

    def _ports(self) -> dict[str, Port]:
        """The ready actors, as the exchange of outputs sees them."""
        with self._looking:
            waiting = set(self._starting.values())
            return {name: _port(handle) for name, handle in self._handles.items() if name not in waiting}

    def shutdown(self) -> None:
        """End the actors; safe to call twice."""
        if self._exchange is not None:
            self._exchange.close()
        waiting = set(self._starting.values())
        closing = [handle.close.remote() for name, handle in self._handles.items() if name not in waiting]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for handle in self._handles.values():
            ray.kill(handle)
        self._handles, self._starting = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _port(handle: Any) -> Port:
    def exchange(others: list[Output]) -> list[Output]:
        found: list[Output] = ray.get(handle.exchange.remote(others), timeout=EXCHANGE_S)
        return found

    return exchange


def _looks_up(engine: EngineConfig) -> bool:
    """Whether its drafter is lookup, or has it besides."""
    return engine.drafter is not None and engine.drafter.split("+")[-1] == "lookup"


def _slots(engine: EngineConfig) -> int:
    """Rows to keep aboard an engine: a full batch, and a few to fill freed places at once."""
    return engine.max_batch_size + max(2, engine.max_batch_size // 4)
