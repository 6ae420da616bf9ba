"""An asyncio front for an engine: one thread runs the rounds, any number of event loops await their requests.

A request's failure is its own. A failure of the loop fails every pending request with its cause and ends the engine.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from cast_ray.config import EngineConfig
from cast_ray.drafters.lookup import Output
from cast_ray.engine.books import Event
from cast_ray.engine.engine import Engine
from cast_ray.engine.streams import Delta, Stream, wake
from cast_ray.errors import EngineError
from cast_ray.request import Completion, Prompt, SamplingParams


class AsyncEngine:
    """Blocking to construct (it loads the models); safe to use from any thread afterwards."""

    def __init__(self, config: EngineConfig | None = None, lookup_scope: str | None = None) -> None:
        """lookup_scope: of requests that name none, see `Engine.submit`."""
        self._engine = Engine(config)
        self._lookup_scope = lookup_scope
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[], None], Callable[[Exception], None]]] = deque()
        self._streams: dict[str, Stream] = {}
        self._names = itertools.count()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="cast-ray-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lookup_scope: str | None = None,
    ) -> Completion:
        """Complete one prompt. RequestError when it is invalid, EngineError when the engine has failed.

        Cancelling the awaiting task aborts the request within a round. lookup_scope: see `Engine.submit`.
        """
        with self._opened(prompt, params, request_id, priority, every_delta=False, lookup_scope=lookup_scope) as stream:
            completion = (await stream.next()).completion
            assert completion is not None, "such a stream wakes only for the end"
            return completion

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        traced: bool = False,
        lookup_scope: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The tokens and text of one prompt as they come; the last delta has the completion. Errors as in `generate`.

        A consumer that is slower than the engine gets fewer, larger deltas. Closing the generator, or cancelling the
        task that iterates, aborts the request within a round. priority: lower numbers go first.
        traced: deltas show what their rounds did, which costs a little for this request alone. lookup_scope: see
        `Engine.submit`.
        """
        with self._opened(
            prompt, params, request_id, priority, every_delta=True, traced=traced, lookup_scope=lookup_scope
        ) as stream:
            while not stream.ended:
                yield await stream.next()

    def stats(self) -> dict[str, Any]:
        """The engine's statistics, read between two rounds."""
        if not self.healthy:
            return self._engine.stats()
        future: Future[dict[str, Any]] = Future()
        try:
            self._post(lambda: future.set_result(self._engine.stats()), future.set_exception)
            return future.result()
        except EngineError:  # it failed meanwhile; what it counted is still there
            return self._engine.stats()

    def exchange_outputs(self, others: Sequence[Output]) -> list[Output]:
        """See Engine.exchange_outputs; done between two rounds, and waited for. EngineError when it has ended."""
        future: Future[list[Output]] = Future()
        self._post(lambda: future.set_result(self._engine.exchange_outputs(others)), future.set_exception)
        return future.result()

    def render(self, prompt: Prompt) -> list[int]:
        """See Engine.render."""
        return self._engine.render(prompt)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self._engine.tokenizer

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

    @contextmanager
    def _opened(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        *,
        every_delta: bool,
        traced: bool = False,
        lookup_scope: str | None = None,
    ) -> Iterator[Stream]:
        """A submitted request's stream; the request is aborted when its consumer leaves before the end."""
        stream = Stream(request_id or f"request-{next(self._names)}", every_delta)
        self._post(lambda: self._start(stream, prompt, params, priority, traced, lookup_scope), stream.fail)
        try:
            yield stream
        finally:
            if not stream.ended:
                self._give_up(stream)

    def _give_up(self, stream: Stream) -> None:
        with self._wake:
            if self.healthy:
                self._inbox.append((lambda: self._abort(stream), _nobody))
                self._wake.notify()

    def _post(self, action: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """Have the loop thread do `action`; `fail` is told where it ends before. EngineError when it has ended."""
        with self._wake:
            if self.healthy:
                self._inbox.append((action, fail))
                self._wake.notify()
                return
        raise self._error()

    def _start(
        self,
        stream: Stream,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        traced: bool,
        lookup_scope: str | None,
    ) -> None:
        try:
            self._engine.submit(
                stream.request_id,
                prompt,
                params,
                priority=priority,
                stream=stream.every_delta,
                traced=traced,
                lookup_scope=lookup_scope or self._lookup_scope,
            )
        except Exception as error:  # whatever one request provokes is its own
            stream.fail(error)
            return
        self._streams[stream.request_id] = stream

    def _abort(self, stream: Stream) -> None:
        # What is not told yet may be its end, and is told before it is forgotten.
        self._deliver(self._engine.flush())
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort(stream.request_id)

    def _loop(self) -> None:
        try:
            while not self._closed:
                self._take_inbox()
                self._engine.advance(self._deliver)
        except BaseException as error:
            self._failure = error
        finally:
            # What had ended before is told; where that fails too, all who wait are told why.
            with suppress(Exception):
                self._deliver(self._engine.flush())
            self._fail_pending()

    def _deliver(self, events: list[Event]) -> None:
        woken = []
        for event in events:
            stream = self._streams[event.request_id]
            if stream.add(event.token_ids, event.text, event.completion, event.trace, event.logprobs):
                woken.append(stream)
            if event.completion is not None:
                del self._streams[event.request_id]
        wake(woken)

    def _take_inbox(self) -> None:
        if not (self._inbox or self._engine.has_work):
            self._engine.check_integrity()
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
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for _, fail in waiting:
            fail(error)

    def _error(self) -> EngineError:
        if self._failure is None:
            return EngineError("the engine is closed. Start another one.")
        error = EngineError(f"the engine failed: {type(self._failure).__name__}: {self._failure}. Start another one.")
        error.__cause__ = self._failure
        return error


def _nobody(error: Exception) -> None:
    """Whom a failed abort is told."""
