"""The routes of files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.datastructures import FormData, UploadFile

from cast_ray.config import ServeLimits
from cast_ray.serve import openapi
from cast_ray.serve.files import Record, Store, file_record, public
from cast_ray.serve.keys import Caller
from cast_ray.serve.protocol import BatchRequest
from cast_ray.serve.refusal import Refusal, storage_full, too_large
from cast_ray.serve.service import Service, read

Page = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=64)]


def add_files(api: FastAPI, service: Service) -> None:
    caller_of = Depends(service.caller)
    store = service.batches.files
    keeping = asyncio.Lock()
    file = openapi.named("file")

    @api.post("/v1/files", **openapi.operation(file, 400, 408, 415, 429, upload=True))
    async def upload(request: Request, caller: Caller = caller_of) -> Response:
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Refusal(415, "A file must be sent as multipart/form-data.", code="unsupported_media_type")
        with caller.admitted():
            await asyncio.to_thread(_check_room, store, service.config.limits, caller, 0)
            async with _form(request, service.config.limits.request_s) as form:
                sent, purpose = form.get("file"), form.get("purpose")
                if sent is None or isinstance(sent, str):
                    raise Refusal(400, "The form needs a file.", param="file", code="missing_required_parameter")
                if purpose != "batch":
                    raise Refusal(400, "purpose must be 'batch'.", param="purpose", code="invalid_value")
                if (sent.size or 0) > service.config.limits.file_bytes:
                    raise too_large("file", service.config.limits.file_bytes)
                # One after the other, or two together could take what is left for one.
                async with keeping:
                    await asyncio.to_thread(_check_room, store, service.config.limits, caller, sent.size or 0)
                    record = await _keep(store, sent, caller)
        return JSONResponse(public(record))

    @api.get("/v1/files", **openapi.operation(openapi.named("list"), 400))
    async def files(after: After = None, limit: Page = 100, caller: Caller = caller_of) -> Response:
        return JSONResponse(await asyncio.to_thread(store.page, caller.owner, after, limit))

    @api.get("/v1/files/{file_id}", **openapi.operation(file, 404))
    async def one_file(file_id: str, caller: Caller = caller_of) -> Response:
        return JSONResponse(public(store.get(file_id, caller.owner)))

    text = openapi.operation({"type": "string"}, 404, media="application/octet-stream")

    @api.get("/v1/files/{file_id}/content", **text)
    async def content(file_id: str, caller: Caller = caller_of) -> Response:
        store.get(file_id, caller.owner)
        return FileResponse(store.path(file_id, ".bin"), media_type="application/octet-stream")

    @api.delete("/v1/files/{file_id}", **openapi.operation(file, 404))
    async def delete(file_id: str, caller: Caller = caller_of) -> Response:
        store.get(file_id, caller.owner)
        store.delete(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def add_batches(api: FastAPI, service: Service) -> None:
    caller_of = Depends(service.caller)
    batches = service.batches
    batch = openapi.named("batch")

    @api.post("/v1/batches", **openapi.operation(batch, 400, 404, 408, 415, 429, body=BatchRequest))
    async def create(request: Request, caller: Caller = caller_of) -> Response:
        body = await read(BatchRequest, request)
        with caller.admitted():
            await asyncio.to_thread(batches.make_room, caller.owner)
            made = batches.create(
                caller.owner, body.input_file_id, body.endpoint, body.completion_window, body.metadata
            )
        return JSONResponse(public(made))

    @api.get("/v1/batches", **openapi.operation(openapi.named("list"), 400))
    async def listed(after: After = None, limit: Page = 20, caller: Caller = caller_of) -> Response:
        return JSONResponse(await asyncio.to_thread(batches.records.page, caller.owner, after, limit))

    @api.get("/v1/batches/{batch_id}", **openapi.operation(batch, 404))
    async def one_batch(batch_id: str, caller: Caller = caller_of) -> Response:
        return JSONResponse(public(batches.get(batch_id, caller.owner)))

    @api.post("/v1/batches/{batch_id}/cancel", **openapi.operation(batch, 404, 409))
    async def cancel(batch_id: str, caller: Caller = caller_of) -> Response:
        return JSONResponse(public(batches.cancel(batch_id, caller.owner)))


@asynccontextmanager
async def _form(request: Request, seconds: float) -> AsyncGenerator[FormData]:
    """An upload in full. Refusal where it takes longer than a request may."""
    try:
        async with asyncio.timeout(seconds):
            form = await request.form(max_files=1, max_fields=8)
    except TimeoutError:
        raise Refusal(408, f"The file did not arrive within {seconds:g} s.", code="request_timeout") from None
    try:
        yield form
    finally:
        await form.close()


def _check_room(store: Store, limits: ServeLimits, caller: Caller, size: int) -> None:
    """Refusal where a file of `size` bytes more is too much for the caller."""
    used, count = store.usage(caller.owner)
    if used + size > limits.storage_bytes:
        raise storage_full(used, limits.storage_bytes, "bytes")
    if count >= limits.files:
        raise storage_full(count, limits.files, "files")


async def _keep(store: Store, sent: UploadFile, caller: Caller) -> Record:
    """Store an uploaded file; nothing of it where the client goes away."""
    name, size = store.new_id(), 0
    try:
        with store.path(name, ".bin").open("wb") as target:
            while chunk := await sent.read(1 << 20):
                size += await asyncio.to_thread(target.write, chunk)
        return store.save(file_record(name, caller.owner, sent.filename or "file", size, "batch"))
    except BaseException:
        store.delete(name)
        raise
