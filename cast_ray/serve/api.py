"""The routes: OpenAI's API, health, and the live page. Each reads its request, asks others, and shapes the answer."""

from __future__ import annotations

import asyncio
import importlib.resources
import time
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from cast_ray.config import ServeConfig
from cast_ray.request import SamplingParams
from cast_ray.serve import openapi
from cast_ray.serve.file_routes import add_batches, add_files
from cast_ray.serve.guard import App, Guard
from cast_ray.serve.keys import Caller
from cast_ray.serve.protocol import BatchRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cast_ray.serve.recent import Recent
from cast_ray.serve.refusal import Refusal
from cast_ray.serve.service import Service, read
from cast_ray.serve.wire import Ask

PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


def create_api(config: ServeConfig, handle: DeploymentHandle) -> App:
    """The ASGI application. handle: of the engine deployment."""
    recent = Recent()
    service = Service(config, handle, recent)
    api = FastAPI(
        title="cast_ray",
        version="1",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        lifespan=service.lifespan,
    )
    _add_errors(api)
    _add_models(api, service)
    _add_answers(api, service)
    add_files(api, service)
    add_batches(api, service)
    _add_status(api, service)
    bodies: list[type[BaseModel]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, BatchRequest]
    described = openapi.complete(api.openapi(), bodies)

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> JSONResponse:
        return JSONResponse(described)

    return Guard(api, config.limits, recent)


def _add_errors(api: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return JSONResponse(error.body(), error.status, error.all_headers())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        texts = {404: "There is nothing at this path.", 405: f"This path does not take {request.method}."}
        refusal = Refusal(error.status_code, texts.get(error.status_code, "The request cannot be read."))
        return JSONResponse(refusal.body(), error.status_code, dict(error.headers or {}))

    async def bad_query(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        name = str(error.errors()[0]["loc"][-1])
        refusal = Refusal(400, f"Invalid value for '{name}'.", param=name, code="invalid_value")
        return JSONResponse(refusal.body(), 400)

    api.add_exception_handler(Refusal, refused)
    api.add_exception_handler(HTTPException, http_error)
    api.add_exception_handler(RequestValidationError, bad_query)


def _add_answers(api: FastAPI, service: Service) -> None:
    errors = (400, 404, 408, 415, 429, 503, 504)
    caller_of = Depends(service.caller)

    @api.post("/v1/chat/completions", **openapi.operation(openapi.ANSWER, *errors, body=ChatRequest, stream=True))
    async def chat_completions(request: Request, caller: Caller = caller_of) -> Response:
        return await service.answer(await read(ChatRequest, request), request, caller)

    @api.post("/v1/completions", **openapi.operation(openapi.ANSWER, *errors, body=CompletionRequest, stream=True))
    async def completions(request: Request, caller: Caller = caller_of) -> Response:
        return await service.answer(await read(CompletionRequest, request), request, caller)

    shape = openapi.fields(tokens="array", count="integer")

    @api.post("/tokenize", **openapi.operation(shape, *errors, body=TokenizeRequest))
    async def tokenize(request: Request, caller: Caller = caller_of) -> Response:
        body = await read(TokenizeRequest, request)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "Give either prompt or messages.", param="prompt")
        prompt: Any = body.prompt
        if body.messages is not None:
            prompt = ChatRequest(model=service.model, messages=body.messages or [{}]).chat()
        with caller.admitted():
            tokens = await service.backend.tokenize(Ask("tokenize", prompt, SamplingParams()))
            words = await service.backend.words(tokens) if body.return_token_strs else None
        return JSONResponse({"tokens": tokens, "count": len(tokens), "token_strs": words})

    @api.post("/detokenize", **openapi.operation(openapi.fields(prompt="string"), *errors, body=DetokenizeRequest))
    async def detokenize(request: Request, caller: Caller = caller_of) -> Response:
        body = await read(DetokenizeRequest, request)
        with caller.admitted():
            return JSONResponse({"prompt": await service.backend.detokenize(body.tokens)})


def _add_models(api: FastAPI, service: Service) -> None:
    about = {"id": service.model, "object": "model", "created": service.started, "owned_by": "cast_ray"}
    keyed = [Depends(service.caller)]

    @api.get("/v1/models", dependencies=keyed, **openapi.operation(openapi.named("list")))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [about]})

    @api.get("/v1/models/{model:path}", dependencies=keyed, **openapi.operation(openapi.named("model"), 404))
    async def model(model: str) -> Response:
        if model != service.model:
            raise Refusal(404, f"The model '{model[:64]}' does not exist here.", param="model", code="model_not_found")
        return JSONResponse(about)


def _add_status(api: FastAPI, service: Service) -> None:
    open_to = [Depends(service.status_caller)]

    @api.get("/health", dependencies=open_to, **openapi.operation(openapi.fields(status="string"), 503, keyed=False))
    async def health() -> Response:
        if not service.backend.ready:
            raise Refusal(503, "No engine is up.", code="unavailable", retry_after=5)
        return JSONResponse({"status": "ok"})

    @api.get("/status", dependencies=[Depends(service.caller)], **openapi.operation({"type": "object"}))
    async def status() -> Response:
        replicas = await service.backend.about()
        batches = await asyncio.to_thread(service.batches.running)
        found = {
            "model": service.model,
            "started": service.started,
            "now": time.time(),
            "replicas": replicas,
            "recent": service.recent.report(),
            "batches": batches,
        }
        return JSONResponse(found)

    folder = importlib.resources.files("cast_ray") / "serve" / "page"
    for path, (name, media) in PAGE_FILES.items():
        _add_page_file(api, path, (folder / name).read_bytes(), media, open_to)


def _add_page_file(api: FastAPI, path: str, content: bytes, media: str, dependencies: list[Any]) -> None:
    async def page_file() -> Response:
        return Response(content, media_type=f"{media}; charset=utf-8", headers={"cache-control": "no-cache"})

    api.add_api_route(path, page_file, dependencies=dependencies, include_in_schema=False)
