"""OpenAI's and vLLM's spellings of sampling parameters, put into ours. Values are checked elsewhere, see `fields`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cast_ray.fields import invalid


def plain_names(values: dict[str, Any]) -> dict[str, Any]:
    """What was said, under our names: `max_tokens`, `logprobs` as a number, `json_schema`. RequestError where twice."""
    said = dict(values)
    inner = said.pop("structured_outputs", None)
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise invalid("structured_outputs", inner, "must be a mapping", 'Write {"choice": ["yes", "no"]}')
        _rename(said, {f"guided_{key}": value for key, value in inner.items() if value is not None}.items())
    _rename(said, (("max_tokens", said.pop("max_completion_tokens", None)),))
    for name in ("choice", "regex", "json", "json_object"):
        if f"guided_{name}" in said:
            _rename(said, ((name if name != "json" else "json_schema", said.pop(f"guided_{name}")),))
    if isinstance(said.get("logprobs"), bool):
        top = said.pop("top_logprobs", 0)
        said["logprobs"] = top if said.pop("logprobs") else None
        if said["logprobs"] is None and top:
            raise invalid("top_logprobs", top, "asks for what logprobs=False turns off", "Set logprobs to true")
    response = said.pop("response_format", None)
    if response is not None:
        _rename(said, _response_format(response))
    return {name: value for name, value in said.items() if value is not None}


def _rename(said: dict[str, Any], pairs: Iterable[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is None:
            continue
        if said.get(name) is not None:
            raise invalid(name, value, "is said twice, under two names", "Say it once")
        said[name] = value


def _response_format(value: Any) -> Iterable[tuple[str, Any]]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return ()
    if kind == "json_object":
        return (("json_object", True),)
    inner = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        return (("json_schema", inner["schema"]),)
    remedy = 'Write {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": …}}'
    raise invalid("response_format", value, "is of no known form", remedy)
