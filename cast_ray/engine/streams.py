"""From the loop thread to consumers on event loops: deltas that merge while nobody looks.

A stream never blocks the loop thread and holds at most one delta: a slow consumer gets fewer, larger ones. That is the
whole back-pressure, and it is enough, since a request's tokens are bounded by its max_tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cast_ray.engine.trace import RoundTrace
from cast_ray.request import Completion, TokenLogprob


@dataclass
class Delta:
    """What a request gained since the delta before.

    token_ids, text: the new tokens, and the text that became certain with them: it may lag behind the tokens by a
    character that is not whole yet. rounds: how many gave tokens, one unless the consumer is slow; traces: of these
    rounds, for a request that asks to see them. completion: of the last delta only. logprobs: of the new tokens, for a
    request that asks for them.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    completion: Completion | None = None
    rounds: int = 0
    traces: list[RoundTrace] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None


class Stream:
    """One request's way to its consumer. Made on the consumer's event loop; `add` and `fail` are for other threads.

    every_delta: False wakes the consumer only for the end. ended: whether the consumer has had the last of it.
    """

    def __init__(self, request_id: str, every_delta: bool) -> None:
        self.request_id = request_id
        self.every_delta = every_delta
        self.ended = False
        self.loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._delta: Delta | None = None
        self._error: Exception | None = None

    def add(
        self,
        token_ids: list[int],
        text: str,
        completion: Completion | None,
        trace: RoundTrace | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> bool:
        """Merge what a step brought; True where the consumer is to be woken."""
        with self._lock:
            asleep = self._delta is None
            if self._delta is None:
                self._delta = Delta(self.request_id)
            if self.every_delta:
                self._delta.token_ids += token_ids
                self._delta.text += text
                self._delta.rounds += bool(token_ids)
                if trace is not None:
                    self._delta.traces.append(trace)
                if logprobs is not None:
                    self._delta.logprobs = (self._delta.logprobs or []) + logprobs
            self._delta.completion = completion
        return completion is not None or (asleep and self.every_delta)

    def fail(self, error: Exception) -> None:
        """The next look at the stream raises `error`."""
        with self._lock:
            self._error = error
        wake([self])

    async def next(self) -> Delta:
        """What has come since the last look, once there is something."""
        await self._ready.wait()
        with self._lock:
            self._ready.clear()
            if self._error is not None:
                self.ended = True
                raise self._error
            delta, self._delta = self._delta, None
        assert delta is not None
        self.ended = delta.completion is not None
        return delta

    def wake_here(self) -> None:
        """Wake the consumer, on its own loop."""
        self._ready.set()


def wake(streams: Iterable[Stream]) -> None:
    """Wake the consumers of these streams: one message to each event loop, however many streams it has."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Stream]] = defaultdict(list)
    for stream in streams:
        by_loop[stream.loop].append(stream)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, group)
        except RuntimeError:
            continue  # the loop is closed: nobody listens any more


def _wake_all(streams: list[Stream]) -> None:
    for stream in streams:
        stream.wake_here()
