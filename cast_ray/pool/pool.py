"""EnginePool: starts engine actors on a Ray cluster, waits until they can work, gathers their statistics, ends them.

It runs in the driver. Rows do not pass through it: they go from a PoolClient to the actors directly.
"""

from __future__ import annotations

import time
from typing import Any, Self

import ray

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import CastRayError, EngineError
from cast_ray.pool.actor import EngineActor, EngineFactory, default_engine
from cast_ray.pool.client import PoolMembers
from cast_ray.pool.dispatch import short_cause
from cast_ray.pool.placement import NodeResources, place


class EnginePool:
    """The engine actors of one job.

    Raises from the constructor, with all actors ended: the engines' own error when none of them started and all say the
    like (a missing model, a bad drafter), EngineError when none was ready within `pool.startup_timeout_s`.
    """

    def __init__(self, engine: EngineConfig, pool: PoolConfig, factory: EngineFactory = default_engine) -> None:
        self._config = pool
        self._slots = engine.max_batch_size + max(2, engine.max_batch_size // 4)
        self.failed: dict[str, str] = {}
        actor = ray.remote(EngineActor)
        self._handles: dict[str, Any] = {
            plan.name: actor.options(
                max_restarts=pool.max_restarts, max_task_retries=0, max_concurrency=10_000, **plan.options
            ).remote(plan.name, plan.engine, factory)
            for plan in place(engine, pool, _nodes())
        }
        try:
            self._await_ready()
        except BaseException:
            self.shutdown()
            raise

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def slots(self) -> int:
        """Rows that a client keeps aboard one engine: a full batch, and a few to fill freed places at once."""
        return self._slots

    @property
    def members(self) -> PoolMembers:
        """What a PoolClient needs, in any process of the cluster. Actors still loading are members too."""
        return PoolMembers(tuple(self._handles), tuple(self._handles.values()), self._slots, self._config.row_attempts)

    def _await_ready(self) -> None:
        """Wait for the first actor, then as long again for the others; later ones join while the job runs."""
        began = time.monotonic()
        deadline = began + self._config.startup_timeout_s
        pending = {handle.ready.options(max_task_retries=-1).remote(): name for name, handle in self._handles.items()}
        causes: list[Exception] = []
        ready = 0
        while pending and (left := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(pending), timeout=left)
            for ref in done:
                name = pending.pop(ref)
                try:
                    ray.get(ref)
                except Exception as error:
                    causes.append(error)
                    self.failed[name] = short_cause(error)
                    ray.kill(self._handles.pop(name))
                else:
                    ready += 1
                    if ready == 1:
                        deadline = min(deadline, time.monotonic() + (time.monotonic() - began))
        if ready:
            return
        failed = "; ".join(f"{name}: {text}" for name, text in self.failed.items())
        if pending:
            waited = f"{self._config.startup_timeout_s:g} s ({len(pending)} still starting; failed: {failed or 'none'})"
            raise EngineError(
                f"no engine actor was ready within {waited}. "
                "Look at `ray status` for missing resources, or raise pool.startup_timeout_s"
            )
        cause = getattr(causes[0], "cause", None)
        if isinstance(cause, CastRayError):
            raise cause
        raise EngineError(f"no engine actor started ({failed}). See the logs of those actors in Ray's session folder")

    def stats(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """The actors' statistics by name; an actor that is dead or silent has `cause` and no `engine`."""
        found: dict[str, dict[str, Any]] = {
            name: {"name": name, "engine": None, "cause": text} for name, text in self.failed.items()
        }
        refs = {name: handle.stats.remote() for name, handle in self._handles.items()}
        if refs:
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
        for name, ref in refs.items():
            try:
                found[name] = ray.get(ref, timeout=0)
            except Exception as error:
                found[name] = {"name": name, "engine": None, "cause": short_cause(error)}
        return dict(sorted(found.items()))

    def shutdown(self) -> None:
        """End the actors; safe to call twice."""
        closing = [handle.close.remote() for handle in self._handles.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for handle in self._handles.values():
            ray.kill(handle)
        self._handles = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _nodes() -> list[NodeResources]:
    alive = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return [NodeResources(name, found.get("CPU", 0.0), found.get("GPU", 0.0)) for name, found in alive]
