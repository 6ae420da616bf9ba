"""From an input row to a prompt: which column holds it, and whether this row's value is one.

It applies no chat template and counts no tokens; the engine does, and refuses what is too long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cast_ray.errors import ConfigError, InputError, RequestError, describe
from cast_ray.request import Prompt

_AUTOMATIC: tuple[tuple[str, Literal["text", "messages"]], ...] = (
    ("messages", "messages"),
    ("prompt", "text"),
    ("text", "text"),
)


@dataclass(frozen=True)
class PromptColumn:
    """Where prompts are. as_json: values of this column are JSON text, since their types differ from row to row."""

    name: str
    kind: Literal["text", "messages"]
    as_json: bool = False


def find_prompt_column(
    columns: Iterable[str],
    prompt_column: str | None = None,
    messages_column: str | None = None,
    json_columns: Iterable[str] = (),
) -> PromptColumn:
    """The column asked for, or the first of `messages`, `prompt`, `text`. Raises InputError naming what is there."""
    names = list(columns)
    encoded = set(json_columns)
    if prompt_column is not None and messages_column is not None:
        problem = f"cannot be given together with messages_column={messages_column!r}"
        raise ConfigError(describe("prompt_column", prompt_column, problem, "Give one of the two"))
    if prompt_column is not None or messages_column is not None:
        name, kind = (prompt_column, "text") if prompt_column is not None else (messages_column, "messages")
        assert name is not None
        if name not in names:
            field = "prompt_column" if kind == "text" else "messages_column"
            raise InputError(describe(field, name, "is no column of the input", f"Columns there: {_listed(names)}"))
        return PromptColumn(name, kind, name in encoded)  # type: ignore[arg-type]
    for name, kind in _AUTOMATIC:
        if name in names:
            return PromptColumn(name, kind, name in encoded)
    problem = "none of them is messages, prompt or text"
    raise InputError(describe("input columns", names, problem, "Name yours with prompt_column or messages_column"))


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def read_prompt(value: Any, column: PromptColumn) -> Prompt:
    """The prompt in one cell. Raises RequestError that says what is wrong with it."""
    if column.as_json and isinstance(value, str):
        value = json.loads(value)
    if value is None:
        raise RequestError(describe(column.name, None, "is null", "Give the row a prompt"))
    if column.kind == "text":
        if not isinstance(value, str):
            raise RequestError(describe(column.name, value, f"is {_kind(value)}, not text", "Write it as a string"))
        if not value.strip():
            raise RequestError(describe(column.name, value, "is empty", "Give the row a prompt"))
        return value
    if not isinstance(value, list):
        problem = f"is {_kind(value)}, not a list of messages"
        raise RequestError(describe(column.name, value, problem, 'Write [{"role": "user", "content": "..."}]'))
    if not value:
        raise RequestError(describe(column.name, value, "is empty", "Give the row at least one message"))
    return [_message(column.name, index, message) for index, message in enumerate(value)]


def _message(column: str, index: int, message: Any) -> dict[str, Any]:
    where = f"{column}[{index}]"
    if not isinstance(message, dict):
        raise RequestError(describe(where, message, f"is {_kind(message)}, not a message", "Write role and content"))
    # Arrow gives every message all keys that any message has; a null one was not there.
    given = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in given:
            raise RequestError(describe(where, message, f"has no {key}", "Every message needs a role and a content"))
    if not isinstance(given["role"], str) or not given["role"]:
        raise RequestError(describe(f"{where}.role", given["role"], "is no role", "Use system, user or assistant"))
    if not isinstance(given["content"], str):
        problem = f"is {_kind(given['content'])}, not text"
        raise RequestError(describe(f"{where}.content", given["content"], problem, "Write it as a string"))
    return given


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
