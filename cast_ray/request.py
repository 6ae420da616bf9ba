"""What goes into the engine and what comes out: SamplingParams, Completion, and their statistics.

Plain values, no tensors and no model; the engine's own running state of a request is `engine.scheduler.Sequence`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cast_ray.errors import RequestError, describe

ChatMessage = dict[str, Any]
Prompt = str | list[ChatMessage] | list[int]

SEED_LIMIT = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    max_tokens: most new tokens, at least 1.
    temperature: 0 is greedy (the default: labels and rewrites should be reproducible); above 0 samples.
    seed: in [0, 2**63). Sampled tokens are a function of (prefix, seed, position). Without a seed a sampled request
        draws one and reports it in `Completion.seed`, so that every output can be reproduced.
    stop_token_ids: tokens that end the output besides the model's own end-of-sequence tokens.
    ignore_eos: go on past the model's end-of-sequence tokens (for benchmarks).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise _invalid("max_tokens", self.max_tokens, "must be a whole number of at least 1", "Try 256")
        temperature = self.temperature
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise _invalid("temperature", temperature, "must be a number", "Use 0 for greedy, 0.7 to sample")
        if not math.isfinite(temperature) or temperature < 0 or 0 < temperature < 1e-4:
            raise _invalid(
                "temperature", temperature, "must be 0 (greedy) or a finite number of at least 1e-4", "Try 0 or 0.7"
            )
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < SEED_LIMIT
        ):
            raise _invalid("seed", self.seed, "must be a whole number in [0, 2**63)", "Leave it out to draw one")
        if isinstance(self.stop_token_ids, str | int):
            raise _invalid("stop_token_ids", self.stop_token_ids, "must be a list of token ids", "Write [0, 2]")
        stop = tuple(self.stop_token_ids)
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in stop):
            raise _invalid("stop_token_ids", stop, "must hold whole numbers of at least 0", "Write [0, 2]")
        object.__setattr__(self, "stop_token_ids", stop)
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", self.ignore_eos, "must be true or false", "Leave it out for false")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping, as a YAML file or a dataset row has it; unknown names are an error."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise _invalid(name, values[name], "is not a sampling parameter", f"Known: {', '.join(sorted(known))}")
        return cls(**values)


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


@dataclass
class Completion:
    """One finished request.

    finish_reason: `stop` (an end or stop token came; it is the last of `token_ids` and not in `text`), `length`
        (max_tokens or the model's context was reached) or `abort`.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    num_input_tokens: int
    seed: int | None
    stats: RequestStats = field(default_factory=RequestStats)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, as it travels between processes."""
        return asdict(self)
