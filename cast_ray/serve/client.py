"""Rows of a batch job to the replicas of a running application, with the manners of `pool.client.PoolClient`.

The engines work on them behind whatever people ask online. It starts and ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from cast_ray.errors import EngineError, QueueFullError
from cast_ray.pool.dispatch import short_cause
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.serve.wire import BATCH, Ask

logger = logging.getLogger(__name__)
# Rows aboard one replica until it has said how many it takes, and how often the replicas' number is looked at.
FIRST_SLOTS = 16
LOOK_S = 2.0
# A refused row waits so long, then twice as long, up to the last.
PAUSES_S = (0.25, 8.0)
# Longest that a job waits, in vain, for a replica to be up.
PATIENCE_S = 600.0


class ServeClient:
    """Rows in, answers out, from any thread or event loop.

    app: name of the application. attempts: replicas that a row may go down with before it is given up.
    """

    def __init__(self, app: str, attempts: int = 3, lookup_scope: str | None = None) -> None:
        from ray import serve

        from cast_ray.serve.app import ENGINE

        try:
            self._handle: Any = serve.get_deployment_handle(ENGINE, app_name=app)
            running = serve.status().applications.get(app)
        except Exception as error:
            raise EngineError(
                f"attach={app!r}: {short_cause(error).rstrip('.')}. Start the application first."
            ) from None
        if running is None:
            raise EngineError(f"attach={app!r}: no such Serve application runs here. Start it with `cast-ray serve`.")
        self._attempts = attempts
        self._scope = lookup_scope
        self._slots = FIRST_SLOTS
        self._aboard = 0
        self._room: asyncio.Condition | None = None
        self._looked = float("-inf")
        # A loop of its own: Ray Data blocks the loop of an async stage while its output waits for a reader, and the
        # engines must be fed meanwhile.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="cast-ray-serve-client", daemon=True).start()

    async def generate(self, rows: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answers in the order of rows. Raises EngineError when no replica is up for too long."""
        work = asyncio.run_coroutine_threadsafe(self._generate(rows), self._loop)
        return await asyncio.wrap_future(work)

    def about(self, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """What every replica tells of itself (`EngineReplica.about`); those that do not answer in time are missing."""
        try:
            found = self._handle.broadcast("about").results(timeout_s=timeout_s, return_exceptions=True)
        except Exception as error:  # none is up
            logger.debug("no news of the replicas: %s", type(error).__name__)
            return []
        return sorted((one for one in found if isinstance(one, dict)), key=lambda one: one["name"])

    async def _generate(self, rows: Sequence[RowRequest]) -> list[RowAnswer]:
        return list(await asyncio.gather(*map(self._row, rows)))

    async def _row(self, row: RowRequest) -> RowAnswer:
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

        deaths, pause, waited = 0, PAUSES_S[0], 0.0
        while True:
            await self._enter()
            try:
                name = f"{row.row_id}#{secrets.token_hex(6)}"
                ask = Ask(name, row.prompt, row.params, BATCH, lookup_scope=self._scope, whole=True)
                answer: RowAnswer = await self._handle.row.remote(ask)
                return answer
            except (BackPressureError, DeploymentUnavailableError) as error:
                if waited > PATIENCE_S:
                    raise EngineError(f"no replica took a row for {PATIENCE_S:g} s: {short_cause(error)}") from None
            except (RayError, RayServeException) as error:
                if not isinstance(getattr(error, "cause", None), QueueFullError):
                    deaths += 1
                    if deaths >= self._attempts:
                        problem = f"{deaths} engines died while they held this row; the last: {short_cause(error)}"
                        return RowAnswer.failed("EngineDied", problem)
            finally:
                await self._leave()
            await asyncio.sleep(pause)
            waited += pause
            pause = min(2 * pause, PAUSES_S[1])

    async def _enter(self) -> None:
        if self._room is None:
            self._room = asyncio.Condition()
        async with self._room:
            while self._aboard >= self._places():
                await self._room.wait()
            self._aboard += 1

    async def _leave(self) -> None:
        assert self._room is not None
        async with self._room:
            self._aboard -= 1
            self._room.notify_all()

    def _places(self) -> int:
        """Rows that this client keeps aboard all replicas: a full batch each, and a few to fill freed places."""
        from cast_ray.serve.ledger import reports

        now = self._loop.time()
        if now - self._looked > LOOK_S:
            self._looked = now
            known = [report.get("slots", FIRST_SLOTS) for report in reports().values()]
            self._slots = sum(known) or FIRST_SLOTS
        return self._slots
