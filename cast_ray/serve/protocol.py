"""What clients send: OpenAI's request bodies, and the engine's requests that they mean.

Fields of the OpenAI API that change nothing here are taken and ignored, those that would change the answer in a way
that we cannot are refused, and unknown ones are refused by name, as OpenAI does. vLLM's extra fields are known too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from cast_ray.config import ServeLimits
from cast_ray.errors import RequestError
from cast_ray.request import SEED_LIMIT, Prompt, SamplingParams
from cast_ray.serve.refusal import PRIVATE, Refusal

MOST_STOPS = 16
MOST_LOGPROBS = 20
Number = float | int


class Body(BaseModel):
    """A JSON body; strict about names and types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """include_usage: a last chunk with token counts. include_rounds: each chunk says which round committed it;
    include_trees: and shows the tree that this round verified."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    include_rounds: bool | None = None
    include_trees: bool | None = None


class Sampling(Body):
    """Fields that completions and chats share."""

    model: str = Field(max_length=256)
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, gt=0, le=1)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    logit_bias: dict[str, Number] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    response_format: dict[str, JsonValue] | None = None
    # vLLM's.
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Number | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    guided_choice: list[str] | None = None
    guided_regex: str | None = None
    guided_json: dict[str, JsonValue] | str | None = None

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def rounds_wanted(self) -> bool:
        """Whether chunks of a stream name their rounds."""
        return bool(self.stream_options and (self.stream_options.include_rounds or self.trees_wanted))

    @property
    def trees_wanted(self) -> bool:
        """Whether chunks of a stream show the trees of their rounds."""
        return bool(self.stream_options and self.stream_options.include_trees)

    def _params(self, own: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
        given = {name: getattr(self, name) for name in _SHARED}
        if self.seed is not None:
            given["seed"] = self.seed % SEED_LIMIT
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        said = {name: value for name, value in {**given, **own}.items() if value is not None}
        # Samples are asked for one by one: each may run on another replica.
        return SamplingParams.from_dict({**defaults, **said})


_SHARED = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "logit_bias", "response_format",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "bad_words", "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "structured_outputs",
    "guided_choice", "guided_regex", "guided_json",
)  # fmt: skip


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=128)
    suffix: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def prompts(self) -> list[Prompt]:
        """Each prompt by itself: text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [cast(Prompt, self.prompt)]
        return cast(list[Prompt], self.prompt)

    def params(self, limits: ServeLimits) -> SamplingParams:
        """Without `n`. RequestError where a value is wrong."""
        own = {
            "logprobs": self.logprobs,
            "echo": self.echo,
            "prompt_logprobs": self.prompt_logprobs,
            "max_tokens": self.max_tokens,
        }
        return self._params(own, {"temperature": 1.0, "max_tokens": 16})

    def check(self, limits: ServeLimits) -> None:
        """Refusal for what is well formed but not to be had here."""
        _check_shared(self, limits)
        prompts = self.prompts()
        if not prompts or any(not prompt for prompt in prompts):
            raise Refusal(400, "prompt: must not be empty.", param="prompt")
        if len(prompts) > limits.prompts:
            raise Refusal(400, f"prompt: has more than the {limits.prompts} prompts of one request.", param="prompt")
        if self.suffix:
            raise Refusal(400, "suffix is not supported by this model.", param="suffix", code="unsupported_parameter")
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = "best_of is not supported beyond n."
            raise Refusal(400, message, param="best_of", code="unsupported_parameter")


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, JsonValue]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    # Taken and ignored.
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, JsonValue] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def params(self, limits: ServeLimits) -> SamplingParams:
        """Without `n`. RequestError where a value is wrong."""
        most = self.max_completion_tokens or self.max_tokens or limits.default_max_tokens
        own = {"max_tokens": most, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        return self._params(own, {"temperature": 1.0})

    def chat(self) -> list[dict[str, Any]]:
        """Messages as templates know them: every content is text, or there is none."""
        return [_plain_message(number, dict(message)) for number, message in enumerate(self.messages)]

    def template(self) -> dict[str, Any]:
        """What the template is given besides messages and tools."""
        given: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
        return given

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the model may call."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    def check(self, limits: ServeLimits) -> None:
        """Refusal for what is well formed but not to be had here."""
        _check_shared(self, limits)
        if len(self.messages) > limits.messages:
            raise Refusal(400, f"messages: are more than the {limits.messages} of one chat.", param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs set to true.", param="top_logprobs")
        if self.modalities not in (None, ["text"]):
            message = "This model answers in text only."
            raise Refusal(400, message, param="modalities", code="unsupported_value")
        if self.tool_choice not in (None, "none", "auto"):
            message = "tool_choice can be 'none' or 'auto' here."
            raise Refusal(400, message, param="tool_choice", code="unsupported_value")
        for number, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict):
                raise Refusal(400, "tools: each must be of type 'function'.", param=f"tools[{number}]")
            if not isinstance(function.get("name"), str):
                raise Refusal(400, "tools: each function needs a name.", param=f"tools[{number}].function.name")
            _check_depth(function.get("parameters"), limits.schema_depth, f"tools[{number}].function.parameters")


class TokenizeRequest(Body):
    """`POST /tokenize`: of a text, or of a chat as its template writes it."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: list[dict[str, JsonValue]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = Field(None, max_length=256)
    tokens: list[int] = Field(max_length=1_000_000)


class BatchRequest(Body):
    """`POST /v1/batches`."""

    input_file_id: str = Field(max_length=64)
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str = Field(max_length=16)
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, JsonValue] | None = None


def _plain_message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise Refusal(400, f"{where}: needs a role.", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                problem = "has a part that is not text, and this model reads text only."
                raise Refusal(400, f"{where}: {problem}", param=f"{where}.content", code="unsupported_content")
            texts.append(part["text"])
        message["content"] = "".join(texts)
    elif content is None and (message.get("tool_calls") or message.get("function_call")):
        message["content"] = ""
    elif not isinstance(content, str):
        raise Refusal(400, f"{where}: needs a content that is text.", param=f"{where}.content")
    return message


def _check_shared(request: CompletionRequest | ChatRequest, limits: ServeLimits) -> None:
    if (request.n or 1) > limits.n:
        raise Refusal(400, f"n: is more than the {limits.n} samples of one request.", param="n")
    if isinstance(request.stop, list) and len(request.stop) > MOST_STOPS:
        raise Refusal(400, f"stop: has more than {MOST_STOPS} strings.", param="stop")
    if request.stream_options is not None and not request.stream:
        raise Refusal(400, "stream_options needs stream set to true.", param="stream_options")
    for name in ("response_format", "structured_outputs", "guided_json"):
        _check_depth(getattr(request, name), limits.schema_depth, name)


def _check_depth(value: Any, deepest: int, param: str) -> None:
    """Level by level: a schema too deep must not be walked with the stack."""
    level = [value]
    for _ in range(deepest):
        level = list(_children(level))
        if not level:
            return
    raise Refusal(400, f"{param}: is nested more than {deepest} levels deep.", param=param)


def _children(level: list[Any]) -> Iterator[Any]:
    for value in level:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list):
            yield from value


def refusal_of(error: ValidationError) -> Refusal:
    """OpenAI's words for a body of the wrong form. The value is not repeated where it may be the client's text."""
    found = error.errors(include_url=False, include_context=False)
    item = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    names = [str(part) for part in item["loc"] if isinstance(part, int) or str(part).isidentifier()]
    param = ".".join(names[:1] if item["type"] not in ("extra_forbidden", "missing") else names) or None
    if item["type"] == "extra_forbidden":
        return Refusal(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if item["type"] == "missing":
        message = f"Missing required parameter: '{param}'."
        return Refusal(400, message, param=param, code="missing_required_parameter")
    if item["type"] == "json_invalid" or param is None:
        return Refusal(400, "The body is not the JSON object that this endpoint takes.", code="invalid_json")
    value = "" if param.split(".")[0] in PRIVATE else f" ({_short(item.get('input'))})"
    text = item["msg"][:1].lower() + item["msg"][1:]
    return Refusal(400, f"Invalid value for '{param}'{value}: {text}.", param=param, code="invalid_value")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def params_of(request: CompletionRequest | ChatRequest, limits: ServeLimits) -> SamplingParams:
    """The checked request's sampling parameters; Refusal where a value is wrong."""
    request.check(limits)
    try:
        return request.params(limits)
    except RequestError as error:
        name = str(error).split("=", 1)[0]
        raise Refusal(400, str(error), param=name, code="invalid_value") from None
