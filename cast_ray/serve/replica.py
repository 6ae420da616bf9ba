"""The Serve replica around one engine: streams, batch rows, health, and what routing and scaling go by.

The engine is that of a batch job. A request's failure is an answer, see `wire`; an engine's death ends the process, and
Serve starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cast_ray.config import EngineConfig
from cast_ray.errors import EngineError, QueueFullError, RequestError
from cast_ray.pool.actor import FAREWELL_S
from cast_ray.pool.routing import TokenEstimate
from cast_ray.pool.rows import RowAnswer
from cast_ray.request import Completion, Prompt, SamplingParams, TokenLogprob, scope_of
from cast_ray.serve.chat import chat_reader, render_chat
from cast_ray.serve.pace import Pace
from cast_ray.serve.refusal import where
from cast_ray.serve.starting import telling
from cast_ray.serve.wire import BATCH, Ask, Failure, Piece, ShownTree, decode_s, messages_of, named_tokens

if TYPE_CHECKING:
    from cast_ray.engine.streams import Delta
    from cast_ray.engine.trace import RoundTrace

logger = logging.getLogger(__name__)
# An engine that answers no question for so long, with requests aboard, is taken for hung.
HANG_S = 300.0
# Longest that a look at the engine may keep its asker waiting.
LOOK_S = 1.0


class ServeEngine(Protocol):
    """What the replica needs of an engine; `engine.async_engine.AsyncEngine` is the one in the product."""

    @property
    def tokenizer(self) -> Any: ...

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lookup_scope: str | None = None,
    ) -> Completion: ...

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        traced: bool = False,
        lookup_scope: str | None = None,
    ) -> AsyncGenerator[Any]: ...

    def render(self, prompt: Prompt) -> list[int]: ...

    def stats(self) -> dict[str, Any]: ...

    @property
    def healthy(self) -> bool: ...

    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig], ServeEngine]


def default_engine(config: EngineConfig) -> ServeEngine:
    """The real engine. Imported here, so that a process that only deploys never loads torch."""
    from cast_ray.engine.async_engine import AsyncEngine

    return AsyncEngine(config)


@dataclass
class _Aboard:
    """A request in the engine: tokens that it is expected to generate, and those it is known to have."""

    expected: float
    began: float
    done: int = 0

    def left(self, now: float, pace: float) -> float:
        """At least one, as long as it has not ended. pace: tokens a second, of one that is told only at its end."""
        return max(1.0, self.expected - (self.done or pace * (now - self.began)))


class EngineReplica:
    """Deployed by `serve.app`. name: of the application; the tag of its series in Prometheus."""

    def __init__(self, config: EngineConfig, factory: EngineFactory, name: str, replica_id: str = "") -> None:
        self._config = config
        self._name = replica_id or _replica_id()
        with telling(name, self._name) as told:
            logger.info("loading %s, drafter %s", config.target, config.drafter)
            self._engine = factory(config)
            told.ready(self._engine.stats())
        self._aboard: dict[str, _Aboard] = {}
        self._estimate = TokenEstimate()
        self._pace = Pace()
        self._slots = config.max_batch_size + max(2, config.max_batch_size // 4)
        # Batch rows wait here and not in the engine, whose queue is for those that cannot wait.
        self._batch_places = asyncio.Semaphore(self._slots)
        self._reports = 0
        self._finished = {"online": 0, "batch": 0}
        self._look: asyncio.Task[dict[str, Any]] | None = None
        self._looked = time.monotonic()
        self._seen: dict[str, Any] = {}
        self._ending = False
        self._metrics = _metrics(name, self._name)

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece]:
        """A piece a round. Closing the iterator takes the request out of the engine within a round."""
        place = self._batch_places if ask.priority >= BATCH else contextlib.nullcontext()
        async with place, contextlib.aclosing(self._answer(ask)) as pieces:
            async for piece in pieces:
                yield piece

    async def _answer(self, ask: Ask) -> AsyncGenerator[Piece]:
        began = time.monotonic()
        first: float | None = None
        outcome = "abort"
        load = self._aboard[ask.request_id] = _Aboard(self._estimate.expect(ask.params.max_tokens), began)
        completion: Completion | None = None
        try:
            prompt = await self._prompt(ask)
            reader = chat_reader(self._engine.tokenizer, prompt) if messages_of(ask.prompt) is not None else None
            async with contextlib.aclosing(self._deltas(ask, prompt)) as deltas:
                async for delta in deltas:
                    completion = delta.completion
                    if first is None and delta.token_ids:
                        first = time.monotonic() - began - (decode_s(completion) if ask.whole and completion else 0.0)
                    load.done += len(delta.token_ids)
                    if completion is not None:
                        outcome = "ok"  # now: whoever has the completion asks for no more
                        self._estimate.observe(len(completion.token_ids))
                    yield Piece(
                        delta.text,
                        tuple(delta.token_ids),
                        delta.rounds,
                        tuple(map(self._shown, delta.traces)),
                        completion,
                        words=self._words(delta.logprobs, completion),
                        logprobs=None if delta.logprobs is None else tuple(delta.logprobs),
                        reader=reader,
                    )
                    reader = None
        except Exception as error:
            outcome = type(error).__name__
            yield Piece(failure=self._failure(error))
        finally:
            self._aboard.pop(ask.request_id, None)
            if outcome == "ok":
                self._pace.observe(load.done, time.monotonic() - began - (first or 0.0))
                self._finished["batch" if ask.priority >= BATCH else "online"] += 1
            if self._metrics is not None:
                self._observe(outcome, time.monotonic() - began, first, completion)

    async def _deltas(self, ask: Ask, prompt: list[int]) -> AsyncGenerator[Delta]:
        """What the engine tells of the request."""
        said: dict[str, Any] = {"request_id": ask.request_id, "priority": ask.priority}
        # Of the messages, which the engine does not see.
        said["lookup_scope"] = scope_of(ask.lookup_scope, ask.prompt)
        if ask.whole:
            from cast_ray.engine.streams import Delta  # it loads torch, which the engine has and a driver need not

            done = await self._engine.generate(prompt, ask.params, **said)
            yield Delta(ask.request_id, done.token_ids, done.text, done, done.stats.rounds, logprobs=done.logprobs)
            return
        async with contextlib.aclosing(self._engine.stream(prompt, ask.params, traced=ask.traced, **said)) as deltas:
            async for delta in deltas:
                yield delta

    async def row(self, ask: Ask) -> RowAnswer:
        """One row of a batch job, as a pool's actor answers it. Raises EngineError only when the engine is dead,
        QueueFullError when it takes no more rows at present."""
        async with contextlib.aclosing(self.stream(ask)) as pieces:
            async for piece in pieces:
                if piece.completion is not None:
                    return RowAnswer.of(piece.completion)
                if piece.failure is not None:
                    if piece.failure.kind == "QueueFullError":
                        raise QueueFullError(piece.failure.message)
                    if piece.failure.kind == "EngineError":
                        raise EngineError(piece.failure.message)
                    return RowAnswer.failed(piece.failure.kind, piece.failure.message)
        raise EngineError(f"the engine of {self._name} ended a row without an answer")

    async def tokenize(self, ask: Ask) -> list[int] | Failure:
        """Token ids of a prompt, as they would be decoded."""
        try:
            return await self._prompt(ask)
        except Exception as error:
            return self._failure(error)

    async def detokenize(self, tokens: list[int]) -> str | Failure:
        """Text of token ids, special ones included."""
        size = len(self._engine.tokenizer)
        if any(not 0 <= token < size for token in tokens):
            return Failure("RequestError", f"tokens: must be token ids in [0, {size})")
        return str(await asyncio.to_thread(self._engine.tokenizer.decode, tokens))

    async def words(self, tokens: list[int]) -> list[str]:
        """The text of each token by itself."""
        return [self._word(token) for token in tokens]

    async def check_health(self) -> None:
        """Called by Serve. Raises when the engine is dead, or holds requests and has not moved for `HANG_S`."""
        if not self._engine.healthy:
            self._end_process()
            raise EngineError(f"the engine of {self._name} is dead")
        await self._ask_engine()
        if self._aboard and time.monotonic() - self._looked > HANG_S:
            raise EngineError(f"the engine of {self._name} has made no round for {HANG_S:g} s")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every few seconds; every router gets it."""
        self._reports += 1
        return {
            "report": self._reports,
            "tokens_per_s": self._capacity(),
            "outstanding_tokens": self._outstanding(),
            "mean_tokens": self._estimate.tokens / self._estimate.rows if self._estimate.rows else None,
            "slots": self._slots,
            "finished": dict(self._finished),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve; read by `serve.scaling`."""
        return {"outstanding_tokens": float(self._outstanding())}

    async def about(self) -> dict[str, Any]:
        """All that the engine tells of itself."""
        await self._ask_engine()
        return {
            "name": self._name,
            "pid": os.getpid(),
            "aboard": len(self._aboard),
            "outstanding_tokens": self._outstanding(),
            "tokens_per_s": self._capacity(),
            "finished": dict(self._finished),
            "engine": self._seen,
        }

    def __del__(self) -> None:
        # Serve lets the requests aboard finish before it comes to this.
        engine = self.__dict__.get("_engine")
        if engine is not None:
            engine.close()

    async def _prompt(self, ask: Ask) -> list[int]:
        # In a thread: a long prompt takes as long as many rounds.
        if messages_of(ask.prompt) is not None and (ask.tools or ask.template):
            return await asyncio.to_thread(render_chat, self._engine.tokenizer, ask)
        return await asyncio.to_thread(self._engine.render, ask.prompt)

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, RequestError):
            return Failure("QueueFullError" if isinstance(error, QueueFullError) else "RequestError", str(error))
        if not self._engine.healthy:
            self._end_process()
            return Failure("EngineError", f"the engine of {self._name} died ({type(error).__name__})")
        # Whatever one request provokes must not harm its neighbours.
        logger.error("a request failed inside the engine: %s", where(error))
        return Failure(type(error).__name__, "failed inside the engine")

    def _end_process(self) -> None:
        """A dead engine may leave its device in any state. Requests aboard are first told why."""
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_later(FAREWELL_S, os._exit, 1)

    def _capacity(self) -> float | None:
        """Tokens a second with a full batch, at the pace of the requests so far; None where there is nothing to go by.

        Rounds take longer the fuller they are, so an idle replica seems a little faster than it is, and a busy one
        slower: a router that goes by this evens out its own mistakes. What a replica did generate would do the
        opposite, since one that gets little work generates little.
        """
        pace = self._pace.tokens_per_s(time.monotonic())
        return pace * self._config.max_batch_size if pace is not None else None

    def _outstanding(self) -> int:
        now = time.monotonic()
        pace = self._pace.tokens_per_s(now) or 0.0
        return round(sum(load.left(now, pace) for load in self._aboard.values()))

    def _word(self, token: int) -> str:
        return str(self._engine.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _shown(self, trace: RoundTrace) -> ShownTree:
        texts, emitted = ([self._word(token) for token in tokens] for tokens in (trace.tokens, trace.committed))
        masses = [round(mass, 4) for mass in trace.masses]
        return ShownTree(texts, trace.parents, masses, trace.accepted, emitted)

    def _words(self, rows: list[TokenLogprob] | None, completion: Completion | None) -> dict[int, str] | None:
        prompt = completion.prompt_logprobs if completion is not None else None
        if rows is None and prompt is None:
            return None
        return {token: self._word(token) for token in named_tokens([*(rows or ()), *(prompt or ())])}

    async def _ask_engine(self) -> None:
        """Refresh what is known of the engine. One question at a time: an engine that is stuck would else take a
        thread for each."""
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(asyncio.to_thread(self._engine.stats))
        done, _ = await asyncio.wait({self._look}, timeout=LOOK_S)
        if not done:
            return
        self._looked, self._seen = time.monotonic(), self._look.result()
        if self._metrics is not None:
            self._metrics.observe_engine(self._seen)

    def _observe(self, outcome: str, seconds: float, first: float | None, completion: Completion | None) -> None:
        stats = completion.stats if completion is not None else None
        self._metrics.observe_row(
            outcome,
            seconds,
            prompt_tokens=completion.num_input_tokens if completion is not None else 0,
            tokens=len(completion.token_ids) if completion is not None else 0,
            rounds=stats.rounds if stats is not None else 0,
        )
        if first is not None:
            self._metrics.observe_first_token(first)


def _replica_id() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _metrics(group: str, name: str) -> Any:
    """The replica's Prometheus series; None outside Ray, where no port shows them."""
    import ray

    if not ray.is_initialized():
        return None
    from cast_ray.stats.metrics import EngineMetrics

    return EngineMetrics(group, name)
