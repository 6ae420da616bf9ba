"""What goes into the engine and what comes out: SamplingParams, Completion, and their statistics.

Plain values, no tensors and no model; the engine's own running state of a request is `engine.scheduler.Sequence`.
What needs the target's vocabulary is checked where a request is submitted, see `sampling.check`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cast_ray.errors import RequestError, describe

ChatMessage = dict[str, Any]
Prompt = str | list[ChatMessage] | list[int]

SEED_LIMIT = 2**63
# What a stranger may send: each is far above what people use, and far below what would hurt others.
MOST_SAMPLES = 128
MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_STOP_TOKENS = 1024
MOST_BIASES = 4096
MOST_BAD_WORDS, LONGEST_BAD_WORD = 256, 256
MOST_CHOICES, LONGEST_CHOICE = 1024, 512
LONGEST_REGEX = 8192
LONGEST_SCHEMA = 65536  # bytes of JSON
STRUCTURES = ("choice", "regex", "json_schema", "json_object")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Names and meanings are those of OpenAI and vLLM.

    Length and end:
    max_tokens: most new tokens, at least 1.
    min_tokens: no end or stop before so many new tokens.
    stop: strings that end the output; the text is cut before the first of them, or behind it with
        include_stop_str_in_output. stop_token_ids: tokens that end it besides the model's own end-of-sequence tokens.
    ignore_eos: go on past the model's end-of-sequence tokens (for benchmarks).

    Choice of tokens, in this order:
    allowed_token_ids, bad_words: what may be emitted, what never (text that the output and its prompt together may not
        come to hold). logit_bias: {token: -100..100}, added to the target's logits.
    repetition_penalty: divides what is in favour of a token of the prompt or output, from above 0; 1 is none.
    frequency_penalty, presence_penalty: -2..2, taken from a token's logit once for each time in the output, and once.
    temperature: 0 is greedy (the default: labels and rewrites should be reproducible); above 0 samples.
    min_p, top_k, top_p: sample only tokens of at least min_p times the likeliest's probability; of the top_k likeliest
        (0 is all); of the likeliest that together reach top_p. A greedy request has no use for them.
    seed: in [0, 2**63). Sampled tokens are a function of (prefix, seed, position). Without a seed a sampled request
        draws one and reports it in `Completion.seed`, so that every output can be reproduced.
    n: samples of one prompt, each with a seed of its own made from `seed`.

    Form of the output, at most one of them:
    choice: the output is one of these strings; choice_probabilities gives how likely each is beside it.
    regex: it matches in full. json_schema: JSON of this schema. json_object: any JSON object.

    What is reported:
    logprobs, prompt_logprobs: 0..20, log probabilities of the output's (the prompt's) tokens and of so many likeliest,
        of the target itself: before bias, penalties, temperature and filters.
    echo: the text begins with the prompt's. skip_special_tokens, spaces_between_special_tokens: as in decoding.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    choice: tuple[str, ...] = ()
    choice_probabilities: bool = False
    regex: str | None = None
    json_schema: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        self._check_structure()
        for name in (f.name for f in fields(self) if f.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "must be true or false", "Leave it out for the default")
        self._check_together()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, as a YAML file, a dataset row or an HTTP body has it.

        Knows the spellings of OpenAI (`max_completion_tokens`, `logprobs: true` with `top_logprobs`,
        `response_format`) and vLLM (`guided_*`, `structured_outputs`). None is "not said"; unknown names are an error.
        """
        said = _plain_names({name: value for name, value in values.items() if value is not None})
        known = {f.name for f in fields(cls)}
        for name in said:
            if name not in known:
                raise _invalid(name, said[name], "is not a sampling parameter", f"Known: {', '.join(sorted(known))}")
        return cls(**said)

    @property
    def structured(self) -> bool:
        """Whether a grammar says what the output looks like."""
        return bool(self.choice or self.json_object) or self.regex is not None or self.json_schema is not None

    @property
    def filtered(self) -> bool:
        """Whether sampling is from a part of the vocabulary only."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def _check_numbers(self) -> None:
        self._whole("max_tokens", 1, None, "Try 256")
        if not _is_number(self.temperature):
            raise _invalid("temperature", self.temperature, "must be a number", "Use 0 for greedy, 0.7 to sample")
        if self.temperature < 0 or 0 < self.temperature < 1e-4 or not math.isfinite(self.temperature):
            problem = "must be 0 (greedy) or a finite number of at least 1e-4"
            raise _invalid("temperature", self.temperature, problem, "Try 0 or 0.7")
        if self.seed is not None:
            self._whole("seed", 0, SEED_LIMIT - 1, "Leave it out to draw one")
        self._number("top_p", 0, 1, "Use 1 for no filter, 0.95 for the usual one", above=True)
        self._whole("top_k", -1, None, "Use 0 for no filter, 40 for the usual one")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        self._number("min_p", 0, 1, "Use 0 for no filter, 0.05 for the usual one")
        self._number("repetition_penalty", 0, 100, "Use 1 for none, 1.1 for a mild one", above=True)
        self._number("presence_penalty", -2, 2, "Use 0 for none")
        self._number("frequency_penalty", -2, 2, "Use 0 for none")
        self._whole("min_tokens", 0, None, "Use 0 for none")
        self._whole("n", 1, MOST_SAMPLES, "Send the prompt several times for more")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MOST_LOGPROBS, "Leave it out for none")

    def _check_lists(self) -> None:
        self._ids("stop_token_ids", MOST_STOP_TOKENS)
        if self.allowed_token_ids is not None:
            self._ids("allowed_token_ids", None)
            if not self.allowed_token_ids:
                raise _invalid("allowed_token_ids", [], "allows nothing", "Name at least one token, or leave it out")
        self._strings("stop", MOST_STOPS, LONGEST_STOP)
        self._strings("bad_words", MOST_BAD_WORDS, LONGEST_BAD_WORD)
        self._strings("choice", MOST_CHOICES, LONGEST_CHOICE)
        if len(set(self.choice)) < len(self.choice):
            raise _invalid("choice", self.choice, "names a label twice", "Give each once")
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            raise _invalid("logit_bias", bias, "must map token ids to numbers", 'Write {"50256": -100}')
        if len(bias) > MOST_BIASES:
            raise _invalid("logit_bias", len(bias), f"has more than {MOST_BIASES} tokens", "Name fewer")
        clean = {}
        for token, value in bias.items():
            number = int(token) if isinstance(token, str) and token.isdecimal() else token
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise _invalid("logit_bias", token, "is no token id", "Use whole numbers of at least 0")
            if not _is_number(value) or not -100 <= value <= 100:
                raise _invalid(f"logit_bias[{token}]", value, "must be a number in [-100, 100]", "Use -100 to ban")
            clean[number] = float(value)
        object.__setattr__(self, "logit_bias", clean)

    def _check_structure(self) -> None:
        if self.regex is not None and not isinstance(self.regex, str):
            raise _invalid("regex", self.regex, "must be text", "Write a regular expression")
        if self.regex is not None and not 0 < len(self.regex) <= LONGEST_REGEX:
            raise _invalid("regex", self.regex, f"must have 1 to {LONGEST_REGEX} characters", "Shorten it")
        schema: Any = self.json_schema
        if schema is None:
            return
        try:
            if not isinstance(schema, str):
                schema = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            if len(schema.encode()) > LONGEST_SCHEMA:
                raise _invalid("json_schema", schema, f"is over {LONGEST_SCHEMA} bytes", "Simplify it")
            parsed = json.loads(schema)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise _invalid("json_schema", schema, f"is no JSON ({error})", "Give an object, or its JSON") from None
        if not isinstance(parsed, dict | bool):
            raise _invalid("json_schema", schema, "is no JSON schema", 'Write {"type": "object", …}')
        object.__setattr__(self, "json_schema", schema)

    def _check_together(self) -> None:
        said = [name for name in STRUCTURES if getattr(self, name) not in ((), None, False)]
        if len(said) > 1:
            raise _invalid(said[1], getattr(self, said[1]), f"contradicts {said[0]}", "Keep one of them")
        if self.choice_probabilities and not self.choice:
            raise _invalid("choice_probabilities", True, "has no choice to weigh", "Give the labels as choice")
        if self.min_tokens > self.max_tokens:
            problem = f"is more than max_tokens={self.max_tokens}"
            raise _invalid("min_tokens", self.min_tokens, problem, "Lower it, or raise max_tokens")
        if self.n > 1 and not self.temperature:
            raise _invalid("n", self.n, "asks for as many equal outputs: temperature is 0", "Set temperature, or n=1")
        if said:
            # A grammar and another rule can leave nothing that both permit.
            for name in ("min_tokens", "allowed_token_ids", "bad_words", "ignore_eos"):
                if getattr(self, name) not in ((), None, 0, False):
                    problem = f"contradicts {said[0]}, which alone says what may come and where the output ends"
                    raise _invalid(name, getattr(self, name), problem, "Leave one of them out")

    def _whole(self, name: str, least: int, most: int | None, remedy: str) -> None:
        value = getattr(self, name)
        wanted = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            raise _invalid(name, value, f"must be a whole number {wanted}", remedy)

    def _number(self, name: str, least: float, most: float, remedy: str, above: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not least <= value <= most or (above and value == least):
            raise _invalid(name, value, f"must be a number in {'(' if above else '['}{least}, {most}]", remedy)

    def _ids(self, name: str, most: int | None) -> None:
        values = _collected(name, getattr(self, name), "token ids", "Write [0, 2]")
        if most is not None and len(values) > most:
            raise _invalid(name, len(values), f"has more than {most} tokens", "Name fewer")
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in values):
            raise _invalid(name, values, "must hold whole numbers of at least 0", "Write [0, 2]")
        object.__setattr__(self, name, values)

    def _strings(self, name: str, most: int, longest: int) -> None:
        given = getattr(self, name)
        values = (given,) if name == "stop" and isinstance(given, str) else given
        values = _collected(name, values, "strings", 'Write ["a", "b"]')
        if len(values) > most:
            raise _invalid(name, len(values), f"has more than {most} strings", "Give fewer")
        for value in values:
            if not isinstance(value, str) or not 0 < len(value) <= longest:
                raise _invalid(name, value, f"must hold strings of 1 to {longest} characters", 'Write ["a", "b"]')
        object.__setattr__(self, name, values)


def _collected(name: str, values: Any, kind: str, remedy: str) -> tuple[Any, ...]:
    if isinstance(values, str | Mapping) or not isinstance(values, Collection):
        raise _invalid(name, values, f"must be a list of {kind}", remedy)
    return tuple(values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain_names(values: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's and vLLM's other spellings, in ours."""
    said = dict(values)
    inner = said.pop("structured_outputs", None)
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise _invalid("structured_outputs", inner, "must be a mapping", 'Write {"choice": ["yes", "no"]}')
        _rename(said, {f"guided_{key}": value for key, value in inner.items() if value is not None}.items())
    _rename(said, (("max_tokens", said.pop("max_completion_tokens", None)),))
    for name in ("choice", "regex", "json", "json_object"):
        if f"guided_{name}" in said:
            _rename(said, ((name if name != "json" else "json_schema", said.pop(f"guided_{name}")),))
    if isinstance(said.get("logprobs"), bool):
        top = said.pop("top_logprobs", 0)
        said["logprobs"] = top if said.pop("logprobs") else None
        if said["logprobs"] is None and top:
            raise _invalid("top_logprobs", top, "asks for what logprobs=False turns off", "Set logprobs to true")
    response = said.pop("response_format", None)
    if response is not None:
        _rename(said, _response_format(response))
    return {name: value for name, value in said.items() if value is not None}


def _rename(said: dict[str, Any], pairs: Iterable[tuple[str, Any]]) -> None:
    for name, value in pairs:
        if value is None:
            continue
        if said.get(name) is not None:
            raise _invalid(name, value, "is said twice, under two names", "Say it once")
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
    raise _invalid("response_format", value, "is of no known form", remedy)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from a job's or request's seed and whatever tells its samples apart; the same everywhere."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _invalid(name: str, value: object, problem: str, remedy: str) -> RequestError:
    return RequestError(describe(name, value, problem, remedy))


@dataclass
class RequestStats:
    """What decoding one request took.

    rounds: decoding rounds, each one target pass over the request's tree.
    nodes_verified: candidates verified in all rounds (the roots not counted).
    tokens_committed: tokens that the rounds committed, over `rounds` the mean round length.
    draft_rounds: rounds for which the drafter ran.
    time_to_first_token_ms, total_ms: wall time since submission.
    """

    rounds: int = 0
    nodes_verified: int = 0
    tokens_committed: int = 0
    draft_rounds: int = 0
    time_to_first_token_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def mean_round_length(self) -> float:
        """Committed tokens a round, R in method notation; 0 before the first round."""
        return self.tokens_committed / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability under the target, and the likeliest tokens at its place with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Completion:
    """One finished request.

    finish_reason: `stop` (an end or stop token came, which is the last of `token_ids` and not in `text`; or a stop
        string, or the end of what `choice`, `regex` or a JSON schema allows), `length` (max_tokens or the model's
        context was reached) or `abort`.
    stop_reason: the stop string or the stop token id that ended it; None for the model's own end and all else.
    index: which of the request's `n` samples. others: the samples behind the first, in the first's completion.
    logprobs: of every output token. prompt_logprobs: of every prompt token, None for the first, which nothing precedes.
    choice_probabilities: label -> its share of the probability that the target gives to all the labels.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    num_input_tokens: int
    seed: int | None
    stats: RequestStats = field(default_factory=RequestStats)
    stop_reason: str | int | None = None
    index: int = 0
    others: list[Completion] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choice_probabilities: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, as it travels between processes."""
        return asdict(self)
