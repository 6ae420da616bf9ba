"""Errors as clients of the OpenAI API know them: status code, `{"error": {message, type, param, code}}`, headers.

A message holds neither a prompt nor a path of this machine. What went wrong inside is a plain 500; the log has more.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cast_ray.serve.wire import Failure

# Fields whose values are the client's text: a message may name them but not repeat them.
PRIVATE = ("prompt", "messages", "input", "tools", "text")

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@dataclass
class Refusal(Exception):
    """A request that gets no answer. retry_after: whole seconds, for the header of the same name."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def all_headers(self) -> dict[str, str]:
        """Headers of the response besides those of every response."""
        if self.retry_after is None:
            return self.headers
        return {**self.headers, "Retry-After": str(self.retry_after)}


def internal_error() -> Refusal:
    """Something failed that is not the client's doing."""
    return Refusal(500, "The server had an error while it processed the request. Send it again later.")


def overloaded(retry_after: int) -> Refusal:
    """More requests than the queues take."""
    message = "The server has more requests than it can queue. Send this one again after the time in Retry-After."
    return Refusal(429, message, code="rate_limit_exceeded", retry_after=retry_after)


def too_large(what: str, limit: int) -> Refusal:
    """A body of more than `limit` bytes."""
    return Refusal(
        413, f"The {what} is larger than the {limit} bytes that this server takes.", code="request_too_large"
    )


def storage_full(used: int, limit: int, what: str) -> Refusal:
    """The key's files take all the room that they may. Not 429: waiting does not help."""
    message = f"Files of this key have {used} of {limit} {what} that they may have. Delete some of them first."
    return Refusal(400, message, param="file", code="storage_limit_exceeded")


def deadline_passed(seconds: float) -> Refusal:
    """The request took longer than it may."""
    return Refusal(504, f"The request was not finished within {seconds:g} s.", code="deadline_exceeded")


def not_found(what: str, name: str, param: str | None = None) -> Refusal:
    """No such file, batch or model, or none that this key may see."""
    return Refusal(
        404, f"No such {what}: '{name}'.", param=param, code=f"{what}_not_found" if what == "model" else None
    )


def from_failure(failure: Failure, secrets: Mapping[str, str], retry_after: int) -> Refusal:
    """What a replica could not do, as the client may know it. secrets: text to replace, such as the model's folder."""
    if failure.kind == "QueueFullError":
        return overloaded(retry_after)
    if failure.kind == "RequestError":
        message = clean_message(failure.message, secrets)
        param = _name_of(message)
        code = "context_length_exceeded" if "leave no room for an answer in a context" in message else None
        return Refusal(400, message, param=param, code=code)
    if failure.kind == "EngineError":
        return Refusal(
            503, "The engine of this request has failed. Send it again.", code="engine_failed", retry_after=1
        )
    return internal_error()


def clean_message(message: str, secrets: Mapping[str, str]) -> str:
    """A house message without the client's text in it and without this machine's paths."""
    name = _name_of(message)
    if name is not None and name.split(".")[0].split("[")[0] in PRIVATE and message.startswith(f"{name}="):
        problem = _behind_value(message[len(name) + 1 :])
        message = f"{name}: {problem}"
    for text, shown in secrets.items():
        if text and text != shown:
            message = message.replace(text, shown)
    return message


def where(error: BaseException) -> str:
    """What to log of an error: its kind and where it happened, not what it said, which may hold a prompt."""
    places = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]
    return f"{type(error).__name__} at {' < '.join(reversed(places))}"


def _name_of(message: str) -> str | None:
    """The field that a house message (`field=value: problem. Remedy.` or `field: problem`) begins with."""
    end = min((place for place in (message.find("="), message.find(":")) if place > 0), default=-1)
    name = message[:end] if end > 0 else ""
    return name if name and all(c.isalnum() or c in "_.[]" for c in name) else None


def _behind_value(rest: str) -> str:
    """The problem and the remedy of a house message, behind a value that may itself hold colons."""
    # A value is a Python repr: it ends with the quote or bracket that it began with, or was cut with three dots.
    closing = {"'": "'", '"': '"', "[": "]", "{": "}", "(": ")"}.get(rest[:1])
    ends = [place + 2 for mark in (closing, "...") if mark and (place := rest.rfind(f"{mark}: ")) >= 0]
    if not ends:
        return rest.split(": ", 1)[-1]
    return rest[max(ends) :].lstrip(". :") or "cannot be used"
