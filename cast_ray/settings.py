"""How settings are found.

One precedence everywhere: what the caller or the command line says, then the YAML file, then the environment
(`CAST_RAY_<FIELD>`), then the default. What settings there are, and what they allow, is `config`'s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from cast_ray.config import Settings
from cast_ray.errors import ConfigError, describe

ENV_PREFIX = "CAST_RAY_"
Kind = TypeVar("Kind", bound=Settings)


def load_settings(kind: type[Kind], path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> Kind:
    """Settings from overrides, then a YAML file, then the environment, then defaults.

    overrides: nested mapping; a `None` means "not said". Environment names are `CAST_RAY_` and the field's path in
    capitals joined by two underscores (`CAST_RAY_ENGINE__DTYPE=float32`).
    """
    values = _from_environment(kind)
    if path is not None:
        values = _merge(values, _read_yaml(Path(path)))
    return kind(**_merge(values, overrides or {}))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            describe("config", str(path), f"cannot be read ({error.strerror})", "Check the path")
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(describe("config", str(path), f"is not YAML ({detail})", "Mend that line")) from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(describe("config", str(path), "must be a mapping of settings", "Write `name: value` lines"))
    return loaded


def _from_environment(kind: type[BaseModel], prefix: str = ENV_PREFIX) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, about in kind.model_fields.items():
        inner = about.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            nested = _from_environment(inner, f"{prefix}{name.upper()}__")
            if nested:
                found[name] = nested
        elif (value := os.environ.get(prefix + name.upper())) is not None:
            found[name] = value
    return found


def _merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for name, value in high.items():
        if isinstance(value, dict):
            inner = merged.get(name)
            merged[name] = _merge(inner if isinstance(inner, dict) else {}, value)
        elif value is not None:
            merged[name] = value
    return merged
