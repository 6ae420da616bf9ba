"""The API's description at /openapi.json: request bodies from `protocol`, and the shape of what comes back."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
_REF = "#/components/schemas/{model}"
_NULLABLE = {"type": ["string", "null"]}
_INTEGER = {"type": "integer"}

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}
USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "speculation"],
    "properties": {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "speculation": {
            "type": "object",
            "required": ["rounds", "mean_round_length", "nodes_verified", "draft_rounds"],
            "properties": {
                "rounds": _INTEGER,
                "mean_round_length": {"type": "number"},
                "nodes_verified": _INTEGER,
                "draft_rounds": _INTEGER,
            },
        },
    },
}
ANSWER: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": _INTEGER,
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
        "usage": USAGE,
    },
}


def named(kind: str) -> Schema:
    """An object that says what it is: `{"object": kind, …}`."""
    return {"type": "object", "required": ["object"], "properties": {"object": {"const": kind}}}


def fields(**types: str) -> Schema:
    """An object of fields of plain types."""
    return {"type": "object", "required": list(types), "properties": {name: {"type": t} for name, t in types.items()}}


def operation(
    answer: Schema | None,
    *errors: int,
    body: type[BaseModel] | None = None,
    stream: bool = False,
    upload: bool = False,
    media: str = "application/json",
    keyed: bool = True,
) -> dict[str, Any]:
    """Arguments of a FastAPI route that describe it."""
    content: Schema = {media: {"schema": answer}} if answer is not None else {media: {}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[int | str, Schema] = {200: {"description": "The answer", "content": content}}
    said = {*errors, 413, 500, *({401} if keyed else ())}
    for status in sorted(said):
        about: Schema = {"description": "See `error.message`", "content": {"application/json": {"schema": ERROR}}}
        if status == 429:
            about["headers"] = {"Retry-After": {"schema": _INTEGER}}
        responses[status] = about
    extra: Schema = {"security": [{"key": []}]} if keyed else {"security": []}
    if body is not None:
        reference = {"$ref": _REF.format(model=body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if upload:
        form = {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
        }
        extra["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return {"responses": responses, "openapi_extra": extra}


def complete(schema: Schema, bodies: list[type[BaseModel]]) -> Schema:
    """FastAPI's description with the request bodies and how keys are sent."""
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for body in bodies:
        one = body.model_json_schema(ref_template=_REF)
        schemas.update(one.pop("$defs", {}))
        schemas[body.__name__] = one
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for operations in schema["paths"].values():
        for about in operations.values():
            about["responses"].pop("422", None)
    return schema
