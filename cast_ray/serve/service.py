"""What the routes share: settings, the way to the replicas, keys, batches, and how a request becomes a response."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from ray.serve.handle import DeploymentHandle

from cast_ray.config import ServeConfig, cache_dir
from cast_ray.serve.answers import Question, opened, question_of, streamed, whole
from cast_ray.serve.backend import Backend
from cast_ray.serve.batches import Batches
from cast_ray.serve.keys import Caller, Keyring
from cast_ray.serve.protocol import ChatRequest, CompletionRequest, refusal_of
from cast_ray.serve.recent import Recent
from cast_ray.serve.refusal import Refusal

Kind = TypeVar("Kind", bound=BaseModel)
# Longest that a client may take to send a JSON body.
BODY_S = 60.0
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Service:
    """What the routes share: settings, the way to the replicas, keys and batches."""

    def __init__(self, config: ServeConfig, handle: DeploymentHandle, recent: Recent) -> None:
        self.config = config
        self.model = config.model_name
        self.recent = recent
        self.started = int(time.time())
        secrets = {config.engine.target: self.model, config.engine.drafter or "": "the drafter"}
        self.backend = Backend(handle, secrets, recent)
        self.keyring: Keyring | None = None
        if config.keys_file is not None:
            self.keyring = Keyring(config.keys_file)
            self.keyring.load()
        folder = config.storage or cache_dir() / "serve" / config.app
        self.batches = Batches(folder, config.limits, self.model, config.batch_concurrency)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Batches run as long as the API does."""
        # Serve's handle learns of the replicas once it is used.
        asking = asyncio.create_task(self.backend.about())
        task = asyncio.create_task(self.batches.run(self.backend))
        yield
        for one in (asking, task):
            one.cancel()
        await asyncio.gather(asking, task, return_exceptions=True)

    async def caller(self, request: Request) -> Caller:
        """A dependency of the routes that need a key."""
        if self.keyring is None:
            return Caller()
        return self.keyring.check(request.headers.get("authorization"))

    async def status_caller(self, request: Request) -> Caller:
        """The same for what may be open to all."""
        return Caller() if self.config.open_status else await self.caller(request)

    def question(self, body: ChatRequest | CompletionRequest, request: Request, caller: Caller) -> Question:
        """A checked request, with the time that its header allows."""
        limit = self.config.limits.request_s
        wanted = request.headers.get("x-request-timeout")
        try:
            seconds = limit if wanted is None else min(limit, float(wanted))
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            raise Refusal(400, "X-Request-Timeout: must be a number of seconds above 0.", param="x-request-timeout")
        scope = caller.lookup_scope(self.config.share_lookups)
        return question_of(body, self.config.limits, self.model, seconds=seconds, lookup_scope=scope)

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request, caller: Caller) -> Response:
        """A completion or chat, whole or streamed. Whether there is an answer is known before its first byte."""
        async with AsyncExitStack() as stack:
            stack.enter_context(caller.admitted())
            question = self.question(body, request, caller)
            if not body.stream:
                found, tokens = await whole(question, self.backend, self.recent)
                caller.used(tokens)
                return JSONResponse(found, headers=caller.headers())
            samples = await opened(question, self.backend)
            chunks = streamed(question, samples, self.recent, caller.used)
            # From here on the stream holds the caller's place, until it ends or the client goes away.
            events = _events(chunks, stack.pop_all())
            headers = {**SSE_HEADERS, **caller.headers()}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(chunks: AsyncGenerator[dict[str, Any]], place: AsyncExitStack) -> AsyncGenerator[str]:
    async with place:
        place.push_async_callback(chunks.aclose)
        failed = False
        async for chunk in chunks:
            failed = "error" in chunk
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        if not failed:
            yield "data: [DONE]\n\n"


async def read(kind: type[Kind], request: Request) -> Kind:
    """A JSON body, checked; Refusal in OpenAI's words where it is not one."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        # Also keeps other sites' pages from sending requests in a browser's name.
        raise Refusal(415, "The body must be sent as Content-Type: application/json.", code="unsupported_media_type")
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.body()
    except TimeoutError:
        raise Refusal(408, f"The body did not arrive within {BODY_S:g} s.", code="request_timeout") from None
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise refusal_of(error) from None
