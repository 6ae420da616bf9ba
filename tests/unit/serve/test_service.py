"""Bodies of requests are read within a time, whatever the client does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from cast_ray.serve import service
from cast_ray.serve.file_routes import _form
from cast_ray.serve.protocol import TokenizeRequest
from cast_ray.serve.refusal import Refusal


def slow_request(media: str) -> Request:
    """One whose body begins and never ends."""
    parts = iter([{"type": "http.request", "body": b"--x\r\n", "more_body": True}])

    async def receive() -> Any:
        if (part := next(parts, None)) is None:
            await asyncio.sleep(3600)
        return part

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", media.encode())]}
    return Request(scope, receive)


def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BODY_S", 0.05)
    with pytest.raises(Refusal) as refused:
        asyncio.run(service.read(TokenizeRequest, slow_request("application/json")))
    assert refused.value.status == 408


def test_an_upload_that_does_not_arrive_is_refused() -> None:
    async def upload() -> None:
        async with _form(slow_request("multipart/form-data; boundary=x"), 0.05):
            pass

    with pytest.raises(Refusal) as refused:
        asyncio.run(upload())
    assert refused.value.status == 408
