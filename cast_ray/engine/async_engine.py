"""An asyncio front for an engine: one thread runs the rounds, any number of event loops await completions.

A request's failure is its own. A failure of the loop fails every pending request with its cause and ends the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from cast_ray.config import EngineConfig
from cast_ray.engine.engine import Engine
from cast_ray.errors import EngineError
from cast_ray.request import Completion, Prompt, SamplingParams

Result = TypeVar("Result")


class AsyncEngine:
    """Blocking to construct (it loads the models); safe to use from any thread afterwards."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self._engine = Engine(config)
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._pending: dict[str, Future[Completion]] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="cast-ray-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Completion:
        """Complete one prompt. RequestError when it is invalid, EngineError when the engine has failed.

        Cancelling the awaiting task aborts the request within a round.
        """
        future: Future[Completion] = Future()
        request_id = request_id or f"request-{id(future):x}"
        self._post(lambda: self._start(request_id, prompt, params, future), future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._post(lambda: self._abort(request_id), None)
            raise

    def stats(self) -> dict[str, Any]:
        """The engine's statistics, read between two rounds."""
        if not self.healthy:
            return self._engine.stats()
        future: Future[dict[str, Any]] = Future()
        self._post(lambda: future.set_result(self._engine.stats()), future)
        try:
            return future.result()
        except EngineError:  # it failed meanwhile; what it counted is still there
            return self._engine.stats()

    def render(self, prompt: Prompt) -> list[int]:
        """See Engine.render."""
        return self._engine.render(prompt)

    @property
    def healthy(self) -> bool:
        """False once the loop has failed or the engine was closed."""
        return self._failure is None and not self._closed

    def close(self) -> None:
        """Stop after the present round; pending requests fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _post(self, action: Callable[[], None], future: Future[Result] | None) -> None:
        with self._wake:
            if self.healthy:
                self._inbox.append((action, future))
                self._wake.notify()
                return
        if future is not None:
            raise self._error()

    def _start(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, future: Future[Completion]
    ) -> None:
        # From here on nobody can cancel the future itself; a cancelled caller aborts the request instead.
        if not future.set_running_or_notify_cancel():
            return
        try:
            if request_id in self._pending:
                raise EngineError(f"request_id={request_id!r} is in use. Give each request its own.")
            self._engine.submit(request_id, prompt, params)
        except Exception as error:
            future.set_exception(error)
            return
        self._pending[request_id] = future

    def _abort(self, request_id: str) -> None:
        if self._pending.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def _loop(self) -> None:
        try:
            while not self._closed:
                self._take_inbox()
                for event in self._engine.step():
                    if event.completion is not None:
                        self._pending.pop(event.request_id).set_result(event.completion)
        except BaseException as error:
            self._failure = error
        finally:
            self._fail_pending()

    def _take_inbox(self) -> None:
        with self._wake:
            while not (self._inbox or self._engine.has_work or self._closed):
                self._wake.wait()
        # Taken out only when it is done: what is still here when an action fails is failed with it.
        while self._inbox:
            self._inbox[0][0]()
            self._inbox.popleft()

    def _fail_pending(self) -> None:
        """The loop has ended: nobody may wait for ever."""
        with self._wake:
            self._closed = True
            waiting, self._inbox = list(self._inbox), deque()
        error = self._error()
        # Nothing is asked of the engine any more: it may be what failed.
        for future in self._pending.values():
            future.set_exception(error)
        self._pending.clear()
        for _, queued in waiting:
            if queued is not None and queued.set_running_or_notify_cancel():
                queued.set_exception(error)

    def _error(self) -> EngineError:
        if self._failure is None:
            return EngineError("the engine is closed. Start another one.")
        error = EngineError(f"the engine failed: {type(self._failure).__name__}: {self._failure}. Start another one.")
        error.__cause__ = self._failure
        return error
