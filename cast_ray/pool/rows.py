"""What travels between a client of the pool and an engine actor: one row's request and its answer.

Plain picklable values. A failed row is an answer with `error` set, never an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

from cast_ray.request import Completion, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One row to generate for; `row_id` is only a name, for messages and for the engine's request id."""

    row_id: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """Outputs, or `error` ("Kind: message") with every output None."""

    text: str | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_generated_tokens: int | None = None
    rounds: int | None = None
    error: str | None = None
    choice_probabilities: dict[str, float] | None = None
    token_ids: tuple[int, ...] | None = None  # where logprobs were asked for, which are theirs
    logprobs: tuple[float, ...] | None = None

    @classmethod
    def of(cls, completion: Completion) -> RowAnswer:
        """The row's answer; an error where the engine had to end the request before its end."""
        if completion.finish_reason == "error":
            return cls.failed("GenerationError", completion.stop_reason or "the engine ended the request")
        return cls(
            text=completion.text,
            finish_reason=completion.finish_reason,
            num_input_tokens=completion.num_input_tokens,
            num_generated_tokens=len(completion.token_ids),
            rounds=completion.stats.rounds,
            choice_probabilities=completion.choice_probabilities,
            token_ids=tuple(completion.token_ids) if completion.logprobs is not None else None,
            logprobs=tuple(token.logprob for token in completion.logprobs) if completion.logprobs is not None else None,
        )

    @classmethod
    def failed(cls, kind: str, message: object) -> RowAnswer:
        """The part before the first colon is the kind that reports count by."""
        return cls(error=f"{kind}: {' '.join(str(message).split())}")
