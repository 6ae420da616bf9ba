"""The output of a request as text and as a Completion. What is in it is decided elsewhere."""

from __future__ import annotations

import time
from typing import Any

from cast_ray.engine.detokenise import OutputText
from cast_ray.engine.sequence import Ending, Sequence
from cast_ray.request import Completion, SamplingParams, TokenLogprob


def output_text(tokenizer: Any, params: SamplingParams) -> OutputText:
    """The text of an output yet to come, for a request that streams or has stop strings."""
    return OutputText(
        tokenizer,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def echo(tokenizer: Any, sequence: Sequence) -> str:
    """The prompt's text, for a request that wants it repeated."""
    if not sequence.params.echo:
        return ""
    return _decode(tokenizer, sequence.tokens[: sequence.num_prompt], sequence.params)


def fresh_logprobs(sequence: Sequence, count: int) -> list[TokenLogprob] | None:
    """The log probabilities of the output's last `count` tokens; None where nobody asked."""
    if sequence.emitting is None or sequence.emitting.logprobs is None:
        return None
    found = sequence.emitting.logprobs
    return found[len(found) - count :]


def complete(tokenizer: Any, sequence: Sequence, ending: Ending) -> Completion:
    """The completion of a request that has ended. Text that no event has shown is added to `fresh`."""
    params, emitting = sequence.params, sequence.emitting
    output = sequence.tokens[sequence.num_prompt :]
    if sequence.text is not None:
        sequence.fresh += sequence.text.finish()
        text = sequence.text.text
    else:
        hidden = ending.hides_last and not params.include_stop_str_in_output
        text = _decode(tokenizer, output[:-1] if hidden else output, params)
    sequence.stats.total_ms = (time.perf_counter() - sequence.submitted) * 1000
    return Completion(
        request_id=sequence.request_id,
        text=echo(tokenizer, sequence) + text,
        token_ids=output,
        finish_reason=ending.reason,
        num_input_tokens=sequence.num_prompt,
        seed=sequence.seed if params.temperature else params.seed,
        stats=sequence.stats,
        stop_reason=ending.stop_reason,
        logprobs=emitting.logprobs if emitting is not None else None,
        prompt_logprobs=emitting.prompt_logprobs if emitting is not None else None,
        choice_probabilities=emitting.choice_probabilities if emitting is not None else None,
    )


def _decode(tokenizer: Any, tokens: list[int], params: SamplingParams) -> str:
    return str(
        tokenizer.decode(
            tokens,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    )
