"""The API's way to the replicas: a request out, its pieces back. What goes wrong on the way becomes a `Refusal`.

A request whose replica dies before its first piece is sent again to another one; its seed is drawn here, so a second
try samples what the first would have. One that has begun fails: what was sent cannot be taken back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from cast_ray.serve.ledger import reports
from cast_ray.serve.recent import Recent
from cast_ray.serve.refusal import Refusal, from_failure, internal_error, overloaded, where
from cast_ray.serve.wire import Ask, Failure, Piece

logger = logging.getLogger(__name__)
ATTEMPTS = 3
PAUSE_S = 0.5
# The page asks every two seconds, whoever looks at it; the replicas are asked once for all of them.
ABOUT_FRESH_S, ABOUT_LIMIT_S = 1.5, 3.0


class Backend:
    """One API process's handle on the engine replicas. secrets: text that no message may hold, and what to write
    instead."""

    def __init__(self, handle: DeploymentHandle, secrets: Mapping[str, str], recent: Recent) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True)
        self._secrets = secrets
        self._recent = recent
        self._about: list[dict[str, Any]] = []
        self._about_at = -1e9
        self._asking = asyncio.Lock()

    async def pieces(self, ask: Ask) -> AsyncGenerator[Piece]:
        """The answer, a piece a round, the last with the completion. Closing it frees the request's place."""
        for attempt in range(ATTEMPTS):
            begun = ended = False
            call = self._stream.stream.remote(ask)
            try:
                async for piece in call:
                    ended = piece.failure is not None or piece.completion is not None
                    if piece.failure is not None:
                        raise self._refusal(piece.failure)
                    begun = True
                    yield piece
                if not ended:
                    raise internal_error()
                return
            except BackPressureError:
                ended = True
                raise overloaded(self._recent.retry_after()) from None
            except (RayError, RayServeException) as error:
                ended = True
                if begun or attempt + 1 == ATTEMPTS:
                    logger.warning("%s: given up after %s", ask.request_id, where(error))
                    raise _lost(error) from None
                logger.warning("%s: sent again after %s", ask.request_id, type(error).__name__)
            finally:
                if not ended:
                    with suppress(RayError, RayServeException):  # it may have failed before it could be cancelled
                        call.cancel()
            await asyncio.sleep(PAUSE_S)

    async def tokenize(self, ask: Ask) -> list[int]:
        """Token ids of the prompt."""
        return await self._call("tokenize", ask)

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of token ids."""
        return await self._call("detokenize", tokens)

    async def words(self, tokens: list[int]) -> list[str]:
        """Text of each token."""
        return await self._call("words", tokens)

    async def about(self) -> list[dict[str, Any]]:
        """What every replica tells of itself; those that do not answer in time are missing."""
        async with self._asking:
            if time.monotonic() - self._about_at > ABOUT_FRESH_S:
                self._about = await asyncio.to_thread(self._ask_all)
                self._about_at = time.monotonic()
        return self._about

    @property
    def ready(self) -> bool:
        """Whether there is a replica to send to, as far as this process knows."""
        return bool(reports())

    def _ask_all(self) -> list[dict[str, Any]]:
        try:
            found = self._handle.broadcast("about").results(timeout_s=ABOUT_LIMIT_S, return_exceptions=True)
        except Exception as error:  # none is up, or one hangs
            logger.info("no news of the replicas: %s", type(error).__name__)
            return []
        return sorted((one for one in found if isinstance(one, dict)), key=lambda one: one["name"])

    async def _call(self, method: str, argument: Any) -> Any:
        try:
            found = await getattr(self._handle, method).remote(argument)
        except BackPressureError:
            raise overloaded(self._recent.retry_after()) from None
        except (RayError, RayServeException) as error:
            raise _lost(error) from None
        if isinstance(found, Failure):
            raise self._refusal(found)
        return found

    def _refusal(self, failure: Failure) -> Refusal:
        return from_failure(failure, self._secrets, self._recent.retry_after())


def _lost(error: Exception) -> Refusal:
    """The replica died, or there is none."""
    if isinstance(error, DeploymentUnavailableError):
        return Refusal(503, "No engine is up. Send the request again later.", code="unavailable", retry_after=5)
    message = "The engine of this request was lost. Send it again."
    return Refusal(503, message, code="engine_failed", retry_after=1)
