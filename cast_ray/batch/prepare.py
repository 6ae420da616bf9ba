"""From an input row to a prompt: which columns hold it, and whether this row's values make one.

It applies no chat template and counts no tokens; the engine does, and refuses what is too long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cast_ray.batch.template import RowTemplate
from cast_ray.config import BatchConfig
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
    remedy = "Name yours with prompt_column or messages_column, or write a template over them"
    raise InputError(describe("input columns", names, problem, remedy))


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


class PromptReader:
    """Makes prompts of rows as a job's settings say. columns: those that it reads.

    Raises InputError where the input lacks one of them.
    """

    def __init__(self, config: BatchConfig, columns: Iterable[str], json_columns: Iterable[str] = ()) -> None:
        names = list(columns)
        encoded = frozenset(json_columns)
        self._template = RowTemplate("template", config.template) if config.template is not None else None
        self._system = RowTemplate("system", config.system) if config.system is not None else None
        self._column: PromptColumn | None = None
        used: list[str] = []
        if self._template is not None:
            used += self._template.columns
        else:
            self._column = find_prompt_column(names, config.prompt_column, config.messages_column, encoded)
            used.append(self._column.name)
        if self._system is not None:
            used += self._system.columns
        for template in (self._template, self._system):
            if template is not None:
                template.check(names)
        self.columns = tuple(dict.fromkeys(used))
        self._encoded = encoded.intersection(self.columns)
        self._chat = config.chat if config.chat is not None else bool(config.template or config.system)

    def read(self, row: dict[str, Any]) -> Prompt:
        """The prompt of a row, given its values in `columns`. Raises RequestError that says what is wrong with it."""
        if self._column is not None:
            prompt = read_prompt(row[self._column.name], self._column)
        else:
            assert self._template is not None
            prompt = self._template.render(self._decoded(row))
            if not prompt.strip():
                raise RequestError(describe("template", self._template.source, "gives an empty prompt", "Fill the row"))
        system = self._system.render(self._decoded(row)) if self._system is not None else None
        if isinstance(prompt, str):
            if not self._chat:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if system is not None and prompt[0].get("role") != "system":  # type: ignore[union-attr]
            prompt = [{"role": "system", "content": system}, *prompt]
        return prompt

    def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        """Values of mixed columns as they stand in the file."""
        return {
            name: json.loads(value) if name in self._encoded and isinstance(value, str) else value
            for name, value in row.items()
        }


def read_prompt(value: Any, column: PromptColumn) -> Prompt:
    """The prompt in one cell. Raises RequestError that says what is wrong with it."""
    if (column.as_json or column.kind == "messages") and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            if column.as_json:
                raise
    if value is None:
        raise RequestError(describe(column.name, None, "is null", "Give the row a prompt"))
    if column.kind == "text":
        if not isinstance(value, str):
            raise RequestError(describe(column.name, value, f"is {_kind(value)}, not text", "Write it as a string"))
        if not value.strip():
            raise RequestError(describe(column.name, value, "is empty", "Give the row a prompt"))
        return value
    return read_messages(column.name, value)


def read_messages(name: str, value: Any) -> list[dict[str, Any]]:
    """value as chat messages. name: of what holds it. Raises RequestError that says what is wrong with it."""
    if not isinstance(value, list):
        problem = f"is {_kind(value)}, not a list of messages"
        raise RequestError(describe(name, value, problem, 'Write [{"role": "user", "content": "..."}]'))
    if not value:
        raise RequestError(describe(name, value, "is empty", "Give the row at least one message"))
    return [_message(name, index, message) for index, message in enumerate(value)]


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
    given["content"] = _text_of(f"{where}.content", given["content"])
    return given


def _text_of(where: str, content: Any) -> str:
    """A message's text, which may also stand in parts, as OpenAI's clients write it."""
    if isinstance(content, str):
        return content
    is_parts = isinstance(content, list) and bool(content) and all(isinstance(part, dict) for part in content)
    if is_parts and all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise RequestError(describe(where, content, f"is {_kind(content)}, not text", "Write it as a string"))


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
