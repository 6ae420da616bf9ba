"""What goes into the engine and what comes out: SamplingParams, Completion, and their statistics.

Plain values, no tensors and no model; the engine's own running state of a request is `engine.scheduler.Sequence`.
What needs the target's vocabulary is checked where a request is submitted, see `sampling.check`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cast_ray.fields import invalid, is_number, number, pattern, schema, strings, token_bias, token_ids, whole
from cast_ray.spellings import plain_names

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
                raise invalid(name, getattr(self, name), "must be true or false", "Leave it out for the default")
        self._check_together()

    def __hash__(self) -> int:
        values = (getattr(self, f.name) for f in fields(self))
        return hash(tuple(frozenset(value.items()) if isinstance(value, Mapping) else value for value in values))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, as a YAML file, a dataset row or an HTTP body has it.

        Knows the spellings of OpenAI (`max_completion_tokens`, `logprobs: true` with `top_logprobs`,
        `response_format`) and vLLM (`guided_*`, `structured_outputs`). None is "not said"; unknown names are an error.
        """
        said = plain_names({name: value for name, value in values.items() if value is not None})
        known = {f.name for f in fields(cls)}
        for name in said:
            if name not in known:
                raise invalid(name, said[name], "is not a sampling parameter", f"Known: {', '.join(sorted(known))}")
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
        whole("max_tokens", self.max_tokens, 1, None, "Try 256")
        temperature = self.temperature
        if not is_number(temperature):
            raise invalid("temperature", temperature, "must be a number", "Use 0 for greedy, 0.7 to sample")
        if temperature < 0 or 0 < temperature < 1e-4 or not math.isfinite(temperature):
            problem = "must be 0 (greedy) or a finite number of at least 1e-4"
            raise invalid("temperature", temperature, problem, "Try 0 or 0.7")
        if self.seed is not None:
            whole("seed", self.seed, 0, SEED_LIMIT - 1, "Leave it out to draw one")
        number("top_p", self.top_p, 0, 1, "Use 1 for no filter, 0.95 for the usual one", above=True)
        whole("top_k", self.top_k, -1, None, "Use 0 for no filter, 40 for the usual one")
        self._set("top_k", max(self.top_k, 0))
        number("min_p", self.min_p, 0, 1, "Use 0 for no filter, 0.05 for the usual one")
        number("repetition_penalty", self.repetition_penalty, 0, 100, "Use 1 for none, 1.1 for a mild one", above=True)
        number("presence_penalty", self.presence_penalty, -2, 2, "Use 0 for none")
        number("frequency_penalty", self.frequency_penalty, -2, 2, "Use 0 for none")
        whole("min_tokens", self.min_tokens, 0, None, "Use 0 for none")
        whole("n", self.n, 1, MOST_SAMPLES, "Send the prompt several times for more")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0, MOST_LOGPROBS, "Leave it out for none")

    def _check_lists(self) -> None:
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids, MOST_STOP_TOKENS))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids, None))
            if not self.allowed_token_ids:
                raise invalid("allowed_token_ids", [], "allows nothing", "Name at least one token, or leave it out")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", strings("stop", stop, MOST_STOPS, LONGEST_STOP))
        self._set("bad_words", strings("bad_words", self.bad_words, MOST_BAD_WORDS, LONGEST_BAD_WORD))
        self._set("choice", strings("choice", self.choice, MOST_CHOICES, LONGEST_CHOICE))
        if len(set(self.choice)) < len(self.choice):
            raise invalid("choice", self.choice, "names a label twice", "Give each once")
        self._set("logit_bias", token_bias("logit_bias", self.logit_bias, MOST_BIASES))

    def _check_structure(self) -> None:
        if self.regex is not None:
            pattern("regex", self.regex, LONGEST_REGEX)
        if self.json_schema is not None:
            self._set("json_schema", schema("json_schema", self.json_schema, LONGEST_SCHEMA))

    def _check_together(self) -> None:
        said = [name for name in STRUCTURES if getattr(self, name) not in ((), None, False)]
        if len(said) > 1:
            raise invalid(said[1], getattr(self, said[1]), f"contradicts {said[0]}", "Keep one of them")
        if self.choice_probabilities and not self.choice:
            raise invalid("choice_probabilities", True, "has no choice to weigh", "Give the labels as choice")
        if self.min_tokens > self.max_tokens:
            problem = f"is more than max_tokens={self.max_tokens}"
            raise invalid("min_tokens", self.min_tokens, problem, "Lower it, or raise max_tokens")
        if self.n > 1 and not self.temperature:
            raise invalid("n", self.n, "asks for as many equal outputs: temperature is 0", "Set temperature, or n=1")
        if said:
            # A grammar and another rule can leave nothing that both permit.
            for name in ("min_tokens", "allowed_token_ids", "bad_words", "ignore_eos"):
                if getattr(self, name) not in ((), None, 0, False):
                    problem = f"contradicts {said[0]}, which alone says what may come and where the output ends"
                    raise invalid(name, getattr(self, name), problem, "Leave one of them out")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from a job's or request's seed and whatever tells its samples apart; the same everywhere."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def scope_of(name: str | None, prompt: Prompt) -> str | None:
    """A request's lookup scope within that of its caller: chats share with chats of the same system message."""
    if name is None:
        return None
    leading = []
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        leading.append(str(message.get("content")))
    return f"{name}\x1f{hashlib.blake2b(chr(31).join(leading).encode(), digest_size=16).hexdigest()}"


@dataclass
class RequestStats:
    """What decoding one request took.

    rounds: decoding rounds, each one target pass over the request's tree.
    nodes_verified: candidates verified in all rounds (the roots not counted).
    tokens_committed: tokens that the rounds committed, over `rounds` the mean round length.
    draft_rounds: rounds for which the drafter ran.
    accepted_by_source: candidates accepted, by who proposed them: drafter, prompt, output, rows (looked up in those),
        or grammar; a candidate of the drafter and another is the drafter's.
    time_to_first_token_ms, total_ms: wall time since submission.
    """

    rounds: int = 0
    nodes_verified: int = 0
    tokens_committed: int = 0
    draft_rounds: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
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
