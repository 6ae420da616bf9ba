"""Answers that follow a JSON schema as columns with types: one column a property of the schema's object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

PREFIX = "answer_"
_SIMPLE = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}


def typed_columns(schema: dict[str, Any]) -> dict[str, pa.DataType]:
    """Column name -> type of each property at the top of schema; what has no plain type is JSON text."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {f"{PREFIX}{name}": _arrow_type(about) for name, about in properties.items()}


def _arrow_type(about: Any) -> pa.DataType:
    if not isinstance(about, dict):
        return pa.string()
    if "type" not in about and (values := about.get("enum")):
        return pa.string() if all(isinstance(value, str) for value in values) else _JSON
    kind = about.get("type")
    if isinstance(kind, list):  # such as ["string", "null"]
        kinds = [one for one in kind if one != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    if kind == "array":
        inner = _arrow_type(about.get("items"))
        return pa.list_(inner) if inner != _JSON and isinstance(about.get("items"), dict) else _JSON
    return _SIMPLE.get(kind, _JSON) if isinstance(kind, str) else _JSON


# Objects, and whatever may be of several types. A type of its own, to be told from text.
_JSON = pa.large_string()


def append_typed(table: pa.Table, texts: Sequence[str | None], columns: dict[str, pa.DataType]) -> pa.Table:
    """table with a column for each of columns, filled from answers; null where an answer has no such value."""
    objects = [_object(text) for text in texts]
    for name, kind in columns.items():
        values = [found.get(name.removeprefix(PREFIX)) for found in objects]
        table = table.append_column(name, pa.array([_fit(value, kind) for value in values], kind))
    return table


def is_complete(text: str) -> bool:
    """Whether an answer that should be JSON is; one that was cut at max_tokens is not."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text is not None else None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _fit(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if kind == _JSON:
        return json.dumps(value, ensure_ascii=False)
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None  # 10**30 where a whole number was asked for is one, and no column of such holds it
