"""Settings of an engine, a pool, a batch job and a server: their names, defaults, limits and what they are for.

Where their values come from is `settings`'s. Nothing here reads a model or starts a process.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cast_ray.errors import ConfigError, RequestError, describe
from cast_ray.request import SamplingParams

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        "auto",
        description="DFlash folder or hub id, 'embedded', 'none', or 'auto': embedded for the embedded target; "
        "'lookup' finds candidates in the text itself and earlier rows, 'embedded+lookup' and 'FOLDER+lookup' do both",
    )
    width: str = Field(
        "joint", description="how many candidates to verify: ar, chain, fixed:N, deployment, round or joint"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 where the device computes in it, else float32"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:I")
    attention: Literal["auto", "flashinfer", "sdpa"] = Field(
        "auto", description="kernels that attend; auto: FlashInfer where it can run, else PyTorch's SDPA"
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="replay forwards that were captured in sizes; auto: on CUDA; elsewhere it saves nothing"
    )
    graph_seconds: float = Field(20.0, ge=0, description="most seconds that capturing forwards may take at start")
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
        description="tokens that the KV pool holds; default: what fits in memory_share, no more than used",
    )
    memory_share: float | None = Field(
        None, gt=0, le=1, description="of the free memory, the engine's part; default: 0.9 of a GPU, 0.25 of a CPU"
    )
    prefix_cache: bool = Field(True, description="requests share the KV pages of the prompt prefix they have in common")
    lookup_tokens: int = Field(
        1 << 20, ge=0, le=1 << 26, description="tokens of finished rows that lookup keeps for later ones; 0 keeps none"
    )
    watch_drafter: bool = Field(
        True, description="go on without a drafter whose candidates are accepted no better than by chance"
    )
    max_waiting: int = Field(
        4096, ge=1, description="requests that may wait for their turn; one more is refused, to be sent again later"
    )
    profile_dir: Path | None = Field(None, description="where latency profiles are kept; default: the user's cache")
    probe_seconds: float = Field(25.0, gt=0, description="most seconds that measuring the device may take")
    trust_remote_code: bool = Field(False, description="run modelling code shipped with a checkpoint")

    @model_validator(mode="after")
    def _width_is_known(self) -> Self:
        """Said before anything is started: a job's engines would all find it out after loading."""
        check_width(self.width, self.max_nodes)
        return self


class GroupConfig(Settings):
    """Engine actors of one kind of device within a pool."""

    name: str = Field(
        pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", description="small letters, digits and dashes; in actors' names"
    )
    accelerator_type: str | None = Field(None, description="Ray's name of the accelerator, such as H100 or A10G")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources of one actor besides CPUs and GPUs, such as {fast: 1}"
    )
    count: int | None = Field(
        None, ge=1, description="actors; there must be room for all at the start; default: as many as there is room for"
    )
    min: int | None = Field(None, ge=0, description="actors that must be ready before the job begins")
    max: int | None = Field(None, ge=1, description="actors at most; those without room join when there is some")
    num_cpus: float = Field(0, ge=0, description="CPUs that Ray sets aside for one actor; 0 leaves them for reading")
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs of one actor; default: one where the group's nodes have GPUs (say it where they are to come)",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="engine settings that differ in this group")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.count is not None and (self.min is not None or self.max is not None):
            problem = "cannot stand beside min or max"
            raise ConfigError(describe("count", self.count, problem, "Name count, or min and max"))
        if self.min is not None and self.max is None:
            raise ConfigError(describe("min", self.min, "has no max beside it", "Name both, or count"))
        if self.max is not None and (self.min or 0) > self.max:
            raise ConfigError(describe("min", self.min, f"is more than max={self.max}", "Raise max"))
        if bad := {name for name in self.resources if name in ("CPU", "GPU", "memory", "object_store_memory")}:
            problem = f"cannot hold {', '.join(sorted(bad))}"
            raise ConfigError(describe("resources", self.resources, problem, "Use num_cpus and num_gpus"))
        if any(amount <= 0 for amount in self.resources.values()):
            problem = "has an amount of 0 or less"
            raise ConfigError(describe("resources", self.resources, problem, "Ask for 1, or a part"))
        known = set(EngineConfig.model_fields)
        if unknown := set(self.engine) - known:
            problem = f"has no setting {', '.join(sorted(unknown))}"
            raise ConfigError(describe("engine", self.engine, problem, f"Known settings: {', '.join(sorted(known))}"))
        return self


class PoolConfig(Settings):
    """The engine actors of a job."""

    replicas: int | None = Field(
        None, ge=1, description="engine actors; default: one a GPU, or one where there is none"
    )
    groups: tuple[GroupConfig, ...] = Field((), description="kinds of devices, instead of replicas of one kind")
    startup_timeout_s: float = Field(600.0, gt=0, description="longest wait for the first actors to be ready")
    max_restarts: int = Field(10, ge=0, description="times that one actor is started again after it died")
    row_attempts: int = Field(3, ge=1, description="engines that a row may go down with before it is given up")
    hang_timeout_s: float = Field(
        300.0, gt=0, description="longest that an engine with rows may make no round before its process is ended"
    )
    stall_timeout_s: float = Field(
        1800.0, gt=0, description="longest that a job may read, generate and write nothing before it is ended"
    )

    @model_validator(mode="after")
    def _groups_are_one_plan(self) -> Self:
        if self.groups and self.replicas is not None:
            problem = "cannot stand beside groups"
            raise ConfigError(describe("replicas", self.replicas, problem, "Give each group its own count"))
        names = [group.name for group in self.groups]
        if twice := {name for name in names if names.count(name) > 1}:
            problem = f"name {', '.join(sorted(twice))} twice"
            raise ConfigError(describe("groups", names, problem, "Give each group its own name"))
        return self


class BatchConfig(Settings):
    """A batch job: rows in, rows with outputs out."""

    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    pool: PoolConfig = Field(default_factory=lambda: PoolConfig())
    prompt_column: str | None = Field(None, description="column of raw text prompts")
    messages_column: str | None = Field(None, description="column of chat messages (list of role and content)")
    template: str | None = Field(
        None, min_length=1, description="Jinja template over the columns for a user's message: 'Translate: {{ text }}'"
    )
    system: str | None = Field(None, min_length=1, description="system message of every row, a Jinja template as well")
    chat: bool | None = Field(
        None, description="send text as a user's message; default: with a template or a system message"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the model's chat template, such as {enable_thinking: false}"
    )
    id_column: str | None = Field(
        None, description="column that must name each row; default: row_id, id or custom_id where they do, else made"
    )
    max_tokens: int = Field(256, ge=1, description="most new tokens a row")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the job; every row gets its own from it")
    n: int = Field(1, ge=1, le=128, description="samples a row; with more than one the output columns are lists")
    sampling: dict[str, Any] = Field(
        default_factory=dict, description="other sampling parameters, such as {top_p: 0.9, stop: [END]}"
    )
    sampling_column: str | None = Field(
        None, description="column with a row's own sampling parameters; default: sampling, where there is one"
    )
    sampling_columns: tuple[str, ...] = Field(
        (), description="columns that are named like sampling parameters and hold a row's own values"
    )
    choices: tuple[str, ...] = Field((), description="labels; every answer is one of them")
    choice_probabilities: bool = Field(False, description="a column with the probability of each label")
    regex: str | None = Field(None, min_length=1, description="regular expression that every answer matches")
    json_schema: dict[str, Any] | None = Field(
        None, description="JSON schema, or a file of one, of every answer; its properties become columns"
    )
    dedupe: bool = Field(False, description="answer identical requests once")
    group_prefixes: bool = Field(False, description="send rows whose prompts begin alike to the engines together")
    batch_size: int = Field(16, ge=1, description="rows of one unit of work")

    @model_validator(mode="before")
    @classmethod
    def _read_schema_file(cls, values: Any) -> Any:
        schema = values.get("json_schema") if isinstance(values, dict) else None
        if not isinstance(schema, str):
            return values
        try:
            text = schema if schema.lstrip().startswith("{") else Path(schema).read_text(encoding="utf-8")
            return {**values, "json_schema": json.loads(text)}
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
            raise ConfigError(describe("json_schema", schema, problem, "Check the path")) from None
        except ValueError as error:
            problem = f"is not JSON ({error})"
            raise ConfigError(describe("json_schema", schema, problem, "Mend the file")) from None

    @model_validator(mode="after")
    def _can_sample(self) -> Self:
        """What every row would be refused for is refused once, before the job."""
        if own := sorted({"max_tokens", "temperature", "seed", "n"}.intersection(self.sampling)):
            problem = f"holds {', '.join(own)}, which have settings of their own"
            raise ConfigError(describe("sampling", self.sampling, problem, "Move them there"))
        if self.choice_probabilities and not self.choices:
            raise ConfigError(describe("choice_probabilities", True, "has no labels", "Give them with choices"))
        if self.choice_probabilities and self.n > 1:
            problem = "has no meaning for several samples"
            raise ConfigError(describe("choice_probabilities", True, problem, "Leave out n"))
        if self.n > 1 and self.temperature == 0:
            problem = "asks for as many equal answers: temperature is 0"
            raise ConfigError(describe("n", self.n, problem, "Set temperature, such as 0.7"))
        if self.prompt_column is not None and self.messages_column is not None:
            problem = f"cannot be given together with messages_column={self.messages_column!r}"
            raise ConfigError(describe("prompt_column", self.prompt_column, problem, "Give one of the two"))
        if self.template is not None and (column := self.prompt_column or self.messages_column):
            problem = f"cannot be given together with the prompt column {column!r}"
            raise ConfigError(describe("template", self.template, problem, "Write {{ column }} in the template"))
        if self.chat is False and self.system is not None:
            problem = "needs a chat, and chat is false"
            raise ConfigError(describe("system", self.system, problem, "Leave out one of the two"))
        try:
            SamplingParams.from_dict(self.sampling_values())
        except RequestError as error:
            raise ConfigError(str(error)) from None
        return self

    def sampling_values(self) -> dict[str, Any]:
        """The sampling parameters of a row that says nothing itself, without a seed; for `SamplingParams.from_dict`."""
        values = {**self.sampling, "max_tokens": self.max_tokens, "temperature": self.temperature}
        form = {"choice": self.choices, "regex": self.regex, "json_schema": self.json_schema}
        values |= {name: value for name, value in form.items() if value}
        return {**values, "choice_probabilities": True} if self.choice_probabilities else values


class ServeLimits(Settings):
    """What one HTTP request may ask for. What is beyond is refused with 400, 413 or 429, before any engine sees it."""

    body_bytes: int = Field(4 * 2**20, ge=1024, description="bytes of a request's body")
    file_bytes: int = Field(256 * 2**20, ge=1024, description="bytes of an uploaded file")
    storage_bytes: int = Field(4 * 2**30, ge=1024, description="bytes of files that one key may keep, answers included")
    files: int = Field(10_000, ge=1, description="files that one key may keep, answers included")
    batches: int = Field(100, ge=1, description="batches of one key that are not done")
    batch_rows: int = Field(50_000, ge=1, description="requests of one batch file")
    prompts: int = Field(64, ge=1, description="prompts of one completion request")
    n: int = Field(16, ge=1, le=128, description="samples of one prompt")
    messages: int = Field(1024, ge=1, description="messages of one chat")
    schema_depth: int = Field(64, ge=1, le=512, description="nesting of a JSON schema or of tools' parameters")
    default_max_tokens: int = Field(1024, ge=1, description="most new tokens of a chat that names no limit itself")
    request_s: float = Field(600.0, gt=0, description="longest that one request may take, its wait included")


class ServeConfig(Settings):
    """Engine replicas behind an OpenAI-compatible API, on Ray Serve."""

    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    limits: ServeLimits = Field(default_factory=lambda: ServeLimits())
    app: str = Field("cast-ray", pattern="^[A-Za-z0-9_-]+$", description="name of the Serve application")
    model: str | None = Field(
        None, min_length=1, description="name of the model for clients; default: the last part of the target's name"
    )
    host: str = Field("127.0.0.1", description="address that HTTP is served at; the default is this machine only")
    port: int = Field(8000, ge=1, le=65535, description="port that HTTP is served at")
    replicas: int | None = Field(
        None, ge=1, description="engine replicas; default: one a GPU, or one where there is none"
    )
    max_replicas: int | None = Field(
        None, ge=1, description="with this, replicas grow to so many and shrink again, by tokens outstanding"
    )
    target_tokens: int = Field(4096, ge=1, description="tokens outstanding that one replica is to have when scaled")
    num_cpus: float = Field(0, ge=0, description="CPUs that Ray sets aside for one replica")
    num_gpus: float | None = Field(None, ge=0, description="GPUs of one replica; default: one where there are any")
    accelerator_type: str | None = Field(None, description="Ray's name of the accelerator, such as H100 or A10G")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources of one replica besides CPUs and GPUs, such as {fast: 1}"
    )
    max_ongoing: int = Field(256, ge=1, description="requests aboard one replica, those that wait in it included")
    max_queued: int = Field(64, ge=0, description="requests that wait for a replica; more are refused with 429")
    drain_s: float = Field(60.0, gt=0, description="longest that a replica may finish its requests before it ends")
    startup_timeout_s: float = Field(600.0, gt=0, description="longest wait for the first replica to be ready")
    keys_file: Path | None = Field(
        None, description="YAML file of hashed API keys and their limits; default: no key is needed, on loopback only"
    )
    share_lookups: bool = Field(
        False,
        description="lookup may use finished answers for later requests of the same key (without keys: of all)",
    )
    open_status: bool = Field(True, description="/health and the page's files need no key")
    storage: Path | None = Field(None, description="folder of uploaded files and batches; default: in the user's cache")
    batch_concurrency: int = Field(32, ge=1, description="requests of one batch file that are aboard at once")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            problem = f"is fewer than replicas={self.replicas or 1}"
            raise ConfigError(describe("max_replicas", self.max_replicas, problem, "Raise it, or leave it out"))
        if self.keys_file is None and self.host not in LOOPBACK:
            problem = "can be reached from other machines, and no key is needed"
            raise ConfigError(describe("host", self.host, problem, "Give keys_file, or serve at 127.0.0.1"))
        return self

    @property
    def model_name(self) -> str:
        """What clients call the model; never a path."""
        return self.model or self.engine.target.rstrip("/").rsplit("/", 1)[-1]


def check_width(spec: str, max_nodes: int) -> None:
    """ConfigError where `width` is spelt like no policy, or asks for a wider tree than `max_nodes`."""
    known = "Known: ar, chain, fixed:N (such as fixed:31), deployment, round, joint"
    kind, _, count = spec.partition(":")
    if spec not in ("ar", "chain", "deployment", "round", "joint") and not spec.startswith("fixed:"):
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


def cache_dir() -> Path:
    """Where converted models and latency profiles are kept: `$CAST_RAY_HOME`, or `~/.cache/cast_ray`."""
    home = os.environ.get("CAST_RAY_HOME")
    if home:
        return Path(home)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cast_ray"
