"""From a request's body to the engine's requests, and from their pieces to OpenAI's answers: whole, or as a stream.

The same for an HTTP request and for a row of a batch file; they differ in priority and in who waits.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from cast_ray.config import ServeLimits
from cast_ray.request import SamplingParams, derive_seed
from cast_ray.serve.backend import Backend
from cast_ray.serve.chunks import ChunkWriter
from cast_ray.serve.protocol import ChatRequest, CompletionRequest, params_of
from cast_ray.serve.recent import Recent
from cast_ray.serve.refusal import Refusal, deadline_passed, internal_error
from cast_ray.serve.shapes import chat_choice, completion_choice, head, usage
from cast_ray.serve.tagged import ChatReader
from cast_ray.serve.wire import ONLINE, Ask, Piece, decode_s

Body = dict[str, Any]


@dataclass
class Question:
    """A checked request. asks: every sample of every prompt, in the order of their choices."""

    request: CompletionRequest | ChatRequest
    asks: list[Ask]
    answer_id: str
    model: str
    prompts: int
    seconds: float
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)

    @property
    def chat(self) -> bool:
        """Whether it came to the chat endpoint."""
        return isinstance(self.request, ChatRequest)

    @property
    def tools_offered(self) -> bool:
        """Whether the answer may call tools."""
        return isinstance(self.request, ChatRequest) and self.request.offered_tools is not None

    def deadline(self) -> asyncio.Timeout:
        """What is left of the time that the request may take."""
        left = self.seconds - (time.monotonic() - self.began)
        return asyncio.timeout(max(0.0, left))


def question_of(
    request: CompletionRequest | ChatRequest,
    limits: ServeLimits,
    model: str,
    *,
    priority: int = ONLINE,
    seconds: float | None = None,
    seed: int | None = None,
    lookup_scope: str | None = None,
) -> Question:
    """Check a body. Refusal where it cannot be answered. seconds: longest that it may take; default: the limit.
    seed: for a body that names none; default: a fresh one. lookup_scope: see `Engine.submit`."""
    if request.model != model:
        message = f"The model '{request.model[:64]}' does not exist here. This server has '{model}'."
        raise Refusal(404, message, param="model", code="model_not_found")
    params = params_of(request, limits)
    if params.temperature and params.seed is None:
        params = _with_seed(params, secrets.randbits(63) if seed is None else seed)
    chat = isinstance(request, ChatRequest)
    answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    prompts: list[Any] = [request.chat()] if isinstance(request, ChatRequest) else request.prompts()
    asks: list[Ask] = []
    for prompt in prompts:
        for sample in range(request.n or 1):
            own = params if not sample else _with_seed(params, derive_seed(params.seed or 0, sample))
            ask = Ask(f"{answer_id}-{len(asks)}", prompt, own, priority, lookup_scope=lookup_scope)
            ask = replace(ask, traced=request.trees_wanted, whole=not request.stream)
            if isinstance(request, ChatRequest):
                ask = replace(ask, tools=request.offered_tools, template=request.template())
            asks.append(ask)
    return Question(request, asks, answer_id, model, len(prompts), limits.request_s if seconds is None else seconds)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)


@dataclass(frozen=True)
class Opened:
    """A sample that has begun: its first piece, and those to come."""

    first: Piece
    rest: AsyncGenerator[Piece]

    async def pieces(self) -> AsyncGenerator[Piece]:
        """All of them."""
        async with aclosing(self.rest):
            yield self.first
            async for piece in self.rest:
                yield piece


async def whole(question: Question, backend: Backend, recent: Recent) -> tuple[Body, int]:
    """The answer in one body, and the tokens that it took."""
    last: list[Piece | None] = [None] * len(question.asks)
    readers: list[ChatReader] = [ChatReader()] * len(question.asks)
    words: list[dict[int, str]] = [{} for _ in question.asks]
    first: list[float] = []

    async def follow(index: int, ask: Ask) -> None:
        async with aclosing(backend.pieces(ask)) as pieces:
            async for piece in pieces:
                if piece.completion is not None:
                    first.append(time.monotonic() - decode_s(piece.completion))
                readers[index] = piece.reader or readers[index]
                words[index] |= piece.words or {}
                last[index] = piece

    try:
        async with question.deadline(), asyncio.TaskGroup() as group:
            for index, ask in enumerate(question.asks):
                group.create_task(follow(index, ask))
    except TimeoutError:
        raise deadline_passed(question.seconds) from None
    except ExceptionGroup as errors:
        raise _first_refusal(errors) from None
    choices, completions = [], []
    for index, (piece, reader) in enumerate(zip(last, readers, strict=True)):
        if piece is None or piece.completion is None:
            raise internal_error()
        completions.append(piece.completion)
        if question.chat:
            text = reader.reader(question.tools_offered)
            choices.append(chat_choice(index, piece.completion, words[index], text))
        else:
            choices.append(completion_choice(index, piece.completion, words[index]))
    tally = usage(completions, question.prompts)
    recent.observe(min(first) - question.began, time.monotonic() - question.began, tally["completion_tokens"])
    kind = "chat.completion" if question.chat else "text_completion"
    body = {**head(kind, question.answer_id, question.created, question.model), "choices": choices, "usage": tally}
    return body, tally["total_tokens"]


async def opened(question: Question, backend: Backend) -> list[Opened]:
    """Every sample, once each has a first piece: from here on there is an answer. Refusal before that."""
    tasks: list[asyncio.Task[Opened]] = []
    try:
        async with question.deadline(), asyncio.TaskGroup() as group:
            tasks += [group.create_task(_open(backend.pieces(ask))) for ask in question.asks]
    except BaseException as error:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().rest.aclose()
        if isinstance(error, TimeoutError):
            raise deadline_passed(question.seconds) from None
        if isinstance(error, ExceptionGroup):
            raise _first_refusal(error) from None
        raise
    return [task.result() for task in tasks]


async def _open(pieces: AsyncGenerator[Piece]) -> Opened:
    try:
        return Opened(await anext(pieces), pieces)
    except BaseException:
        await pieces.aclose()
        raise


async def streamed(
    question: Question, samples: list[Opened], recent: Recent, used: Callable[[int], None]
) -> AsyncGenerator[Body]:
    """Chunks of the answer; of an error only a last one that says so. used: told the tokens that it took."""
    writer = ChunkWriter(question)
    first = time.monotonic() - question.began
    try:
        async with question.deadline(), aclosing(_merged(samples)) as pieces:
            for index in range(len(question.asks)):
                if question.chat:
                    yield writer.opening(index)
            async for index, piece in pieces:
                for chunk in writer.chunks(index, piece):
                    yield chunk
    except TimeoutError:
        yield deadline_passed(question.seconds).body()
        return
    except Refusal as refusal:
        yield refusal.body()
        return
    finally:
        tally = usage(writer.completions, question.prompts)
        # Of an answer that was cut short, what had been written.
        used(tally["total_tokens"] if writer.completions else writer.tokens)
    recent.observe(first, time.monotonic() - question.began, tally["completion_tokens"])
    if question.request.usage_wanted:
        yield {**writer.head, "choices": [], "usage": tally}


async def _merged(samples: list[Opened]) -> AsyncGenerator[tuple[int, Piece]]:
    """Pieces of all samples as they come."""
    if len(samples) == 1:
        async with aclosing(samples[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()

    async def follow(index: int, sample: Opened) -> None:
        async with aclosing(sample.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))

    tasks = [asyncio.create_task(follow(index, sample)) for index, sample in enumerate(samples)]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if found is not None:
                yield found
                continue
            running -= 1
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first_refusal(errors: ExceptionGroup[Exception]) -> Exception:
    """The refusal among what failed, of several the one that says most."""
    flat = [error for error in errors.exceptions if isinstance(error, Refusal)]
    return min(flat, key=lambda refusal: refusal.status) if flat else errors
