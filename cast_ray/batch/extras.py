"""Output columns that a job asks for beside the usual ones: label probabilities, log probabilities, typed answers."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from cast_ray.batch.typed import append_typed, is_complete, typed_columns
from cast_ray.config import BatchConfig
from cast_ray.pool.rows import RowAnswer
from cast_ray.request import SamplingParams

PROBABILITY = "probability_"
TOKENS, LOGPROBS = "generated_token_ids", "logprobs"


class ExtraColumns:
    """Which columns there are, and their values from the answers. samples: a row has several answers."""

    def __init__(self, config: BatchConfig, samples: bool) -> None:
        self._labels = config.choices if config.choice_probabilities and not samples else ()
        self._logprobs = config.sampling.get("logprobs") is not None and not samples
        self._typed = typed_columns(config.json_schema) if config.json_schema and not samples else {}

    @property
    def names(self) -> list[str]:
        labels = [f"{PROBABILITY}{label}" for label in self._labels]
        return [*labels, *([TOKENS, LOGPROBS] if self._logprobs else []), *self._typed]

    def append(self, table: pa.Table, answers: Sequence[Sequence[RowAnswer]]) -> pa.Table:
        """table with these columns; null in rows that failed."""
        first = [row[0] for row in answers]
        for label in self._labels:
            values = [(answer.choice_probabilities or {}).get(label) for answer in first]
            table = table.append_column(f"{PROBABILITY}{label}", pa.array(values, pa.float64()))
        if self._logprobs:
            table = table.append_column(TOKENS, pa.array([one.token_ids for one in first], pa.list_(pa.int64())))
            table = table.append_column(LOGPROBS, pa.array([one.logprobs for one in first], pa.list_(pa.float64())))
        return append_typed(table, [answer.text for answer in first], self._typed)


def judged(answer: RowAnswer, params: SamplingParams) -> RowAnswer:
    """The answer, or an error where it has not the form that was asked for, as one cut at max_tokens has not."""
    if answer.error is not None or params.echo:
        return answer
    after = f"after {answer.num_generated_tokens} tokens (finish_reason {answer.finish_reason}). Raise max_tokens"
    if (params.json_schema is not None or params.json_object) and not is_complete(answer.text or ""):
        return RowAnswer.failed("IncompleteAnswer", f"the answer is no whole JSON {after}")
    if params.choice and answer.text not in params.choice:
        return RowAnswer.failed("IncompleteAnswer", f"the answer is none of the choices {after}")
    return answer
