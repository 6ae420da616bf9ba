"""Settings of an engine, a pool and a batch job, and how they are found.

One precedence everywhere: what the caller or the command line says, then the YAML file, then the environment
(`CAST_RAY_<FIELD>`), then the default. Nothing here reads a model or starts a process.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cast_ray.errors import ConfigError, RequestError, describe
from cast_ray.request import SamplingParams

ENV_PREFIX = "CAST_RAY_"
Kind = TypeVar("Kind", bound="Settings")


class Settings(BaseModel):
    """Frozen, strict about names, and with errors that name the field, the value and the remedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self)(**{**self.model_dump(), **changes})


class EngineConfig(Settings):
    """One engine on one device. `EngineConfig()` runs the embedded target and drafter on whatever is here."""

    target: str = Field("embedded", description="HF folder, hub id, .gguf file, or 'embedded' (SmolLM2-135M-Instruct)")
    drafter: str | None = Field(
        "auto", description="DFlash folder or hub id, 'embedded', 'none', or 'auto': embedded for the embedded target"
    )
    width: str = Field("deployment", description="how many candidates to verify: ar, chain, fixed:N or deployment")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the device computes in it, else float32"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:I")
    threads: int | None = Field(None, ge=1, description="CPU threads of this engine; default: PyTorch's own choice")
    max_batch_size: int = Field(16, ge=1, le=1024, description="requests decoded together in one round")
    max_context: int | None = Field(None, ge=2, description="prompt + output tokens of a request; default: the model's")
    max_step_tokens: int = Field(
        512, ge=16, description="packed tokens of one forward; prompts are cut to what trees leave of it"
    )
    max_nodes: int = Field(63, ge=1, le=1023, description="the widest tree that a policy may choose")
    candidates_per_depth: int = Field(32, ge=1, le=1024, description="drafted tokens kept at each depth")
    page_size: int = Field(16, ge=1, le=256, description="tokens of one KV page")
    kv_cache_tokens: int | None = Field(
        None,
        ge=16,
        description="tokens that the KV pool holds; default: a quarter of the free memory, no more than used",
    )
    profile_dir: Path | None = Field(None, description="where latency profiles are kept; default: the user's cache")
    probe_seconds: float = Field(25.0, gt=0, description="most seconds that measuring the device may take")
    trust_remote_code: bool = Field(False, description="run modelling code shipped with a checkpoint")

    @model_validator(mode="after")
    def _width_is_known(self) -> Self:
        """Said before anything is started: a job's engines would all find it out after loading."""
        check_width(self.width, self.max_nodes)
        return self


class PoolConfig(Settings):
    """The engine actors of a job."""

    replicas: int | None = Field(
        None, ge=1, description="engine actors; default: one a GPU, or one where there is none"
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="longest wait for the first actor to be ready")
    max_restarts: int = Field(10, ge=0, description="times that one actor is started again after it died")
    row_attempts: int = Field(3, ge=1, description="engines that a row may go down with before it is given up")


class BatchConfig(Settings):
    """A batch job: rows in, rows with outputs out."""

    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    pool: PoolConfig = Field(default_factory=lambda: PoolConfig())
    prompt_column: str | None = Field(None, description="column of raw text prompts")
    messages_column: str | None = Field(None, description="column of chat messages (list of role and content)")
    max_tokens: int = Field(256, ge=1, description="most new tokens a row")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the job; every row gets its own from it")
    batch_size: int = Field(16, ge=1, description="rows of one unit of work")

    @model_validator(mode="after")
    def _can_sample(self) -> Self:
        """What every row would be refused for is refused once, before the job."""
        try:
            SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        return self


def check_width(spec: str, max_nodes: int) -> None:
    """ConfigError where `width` is spelt like no policy, or asks for a wider tree than `max_nodes`."""
    known = "Known: ar, chain, fixed:N (such as fixed:31), deployment"
    kind, _, count = spec.partition(":")
    if spec not in ("ar", "chain", "deployment") and not spec.startswith("fixed:"):
        raise ConfigError(describe("width", spec, "is no known policy", known))
    if kind != "fixed":
        return
    if not re.fullmatch("[0-9]+", count) or int(count) == 0:
        raise ConfigError(describe("width", spec, "needs a whole number of nodes of at least 1", known))
    if int(count) > max_nodes:
        problem = f"is wider than max_nodes={max_nodes}"
        raise ConfigError(describe("width", spec, problem, f"Raise max_nodes to {int(count)}, or narrow the tree"))


def _explain(kind: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"]) or kind.__name__
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            # In the house form already: of a setting of this kind, or of one of a kind nested in it.
            lines.append(f"{name}.{cause}" if item["loc"] else str(cause))
        elif item["type"] == "extra_forbidden":
            remedy = f"Known settings: {', '.join(sorted(kind.model_fields))}"
            lines.append(describe(name, item["input"], f"is no setting of {kind.__name__}", remedy))
        else:
            about = kind.model_fields.get(str(item["loc"][0]) if item["loc"] else "")
            remedy = f"It is: {about.description}" if about and about.description else "See the README's settings"
            lines.append(describe(name, item["input"], item["msg"].rstrip("."), remedy))
    return "; ".join(lines)


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


def cache_dir() -> Path:
    """Where converted models and latency profiles are kept: `$CAST_RAY_HOME`, or `~/.cache/cast_ray`."""
    home = os.environ.get("CAST_RAY_HOME")
    if home:
        return Path(home)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cast_ray"
