"""What stands before every route: size limits, security headers, and the last net for errors.

Plain ASGI, outside FastAPI: an exception that came through would be logged by Serve with its text, prompts in it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from cast_ray.config import ServeLimits
from cast_ray.serve.recent import Recent
from cast_ray.serve.refusal import Refusal, internal_error, too_large, where

logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FILES_PATH = "/v1/files"
# A form's own text around the file.
FORM_BYTES = 64 * 1024
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """Wraps the FastAPI app."""

    def __init__(self, app: App, limits: ServeLimits, recent: Recent) -> None:
        self._app = app
        self._limits = limits
        self._recent = recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        # Serve has taken the client's or made one, and sends it back.
        request_id = _plain(headers.get(b"x-request-id", b""))
        is_upload = scope["path"].rstrip("/") == FILES_PATH
        limit = self._limits.file_bytes + FORM_BYTES if is_upload else self._limits.body_bytes
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._recent.statuses[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *_encoded(HEADERS)]
            await send(message)

        async def refuse(refusal: Refusal) -> None:
            body = json.dumps(refusal.body()).encode()
            shown = {"content-type": "application/json", "content-length": str(len(body)), **refusal.all_headers()}
            await answer({"type": "http.response.start", "status": refusal.status, "headers": _encoded(shown)})
            await answer({"type": "http.response.body", "body": body})

        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > limit:
            await refuse(too_large("body", limit))
            return
        self._recent.running += 1
        try:
            await self._app(scope, _counted(receive, limit), answer)
        except Refusal as refusal:
            if not started:
                await refuse(refusal)
        except Exception as error:
            logger.error("%s: %s", request_id, where(error))
            if not started:
                await refuse(internal_error())
        finally:
            self._recent.running -= 1


def _counted(receive: Receive, limit: int) -> Receive:
    """Bodies that do not say how long they are end at the limit too."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > limit:
                raise too_large("body", limit)
        return message

    return counted


def _plain(request_id: bytes) -> str:
    """Fit for the log."""
    text = request_id.decode("latin-1")
    return text if _PLAIN.fullmatch(text) else "request"


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
