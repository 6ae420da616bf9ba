"""A row's own sampling parameters, read from its columns and laid over the job's. `request` knows what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cast_ray.config import BatchConfig
from cast_ray.errors import InputError, RequestError, describe
from cast_ray.request import STRUCTURES, SamplingParams, derive_seed

SAMPLING_COLUMN = "sampling"
# Texts whatever they look like; a table of text, such as CSV, has its other values as JSON.
_TEXTS = frozenset({"stop", "regex", "json_schema"})
# Other spellings of the form of an output: a row that has one does not keep the job's.
_FORMS = frozenset({*STRUCTURES, "response_format", "structured_outputs", "choice_probabilities"})


class SamplingReader:
    """Where a row's own parameters stand. columns: those that it reads. Raises InputError where one is missing."""

    def __init__(self, config: BatchConfig, columns: Iterable[str], json_columns: Iterable[str] = ()) -> None:
        names = list(columns)
        self._column = config.sampling_column
        if self._column is None and SAMPLING_COLUMN in names:
            self._column = SAMPLING_COLUMN
        self._named = config.sampling_columns
        self.columns = tuple(dict.fromkeys([*([self._column] if self._column else []), *self._named]))
        for name in self.columns:
            if name not in names:
                field = "sampling_columns" if name in self._named else "sampling_column"
                remedy = f"Columns there: {', '.join(names) or 'none'}"
                raise InputError(describe(field, name, "is no column of the input", remedy))
        self._encoded = frozenset(json_columns)

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What the row says itself; empty for most. Raises RequestError."""
        values = self._struct(row[self._column]) if self._column else {}
        for name in self._named:
            value = row[name]
            if isinstance(value, str) and (name not in _TEXTS or name in self._encoded):
                value = _parsed(value)
            if value is not None and value != "":
                values[name] = value
        return values

    def _struct(self, cell: Any) -> dict[str, Any]:
        if isinstance(cell, str):
            cell = _parsed(cell) if cell.strip() else None
        if cell is None:
            return {}
        if not isinstance(cell, dict):
            remedy = 'Write {"temperature": 0.7}, or leave it out'
            raise RequestError(describe(str(self._column), cell, "is no object of sampling parameters", remedy))
        # Arrow gives every struct all keys that any row has; a null one was not there.
        return {name: value for name, value in cell.items() if value is not None}


def row_params(
    job: Mapping[str, Any], own: Mapping[str, Any], seed: int, name: str, most: int
) -> tuple[SamplingParams, ...]:
    """Parameters of each of a row's samples, every one with n=1 and, where it is sampled, with a seed of its own.

    job: the job's values, with its n. own: the row's, which win. seed: the job's. name: what tells the row from others.
    most: samples that the output has room for. Raises RequestError.
    """
    values = dict(job)
    if _FORMS & own.keys() or any(key.startswith("guided_") for key in own):
        values = {key: value for key, value in values.items() if key not in _FORMS}
    if "max_completion_tokens" in own:
        values.pop("max_tokens", None)
    values.update((key, _whole(value)) for key, value in own.items())
    params = SamplingParams.from_dict(values)
    if params.n > most:
        problem = f"is more than the {most} that the output has room for"
        raise RequestError(describe("n", params.n, problem, "Raise n of the job, whose columns are then lists"))
    values.pop("n", None)
    if params.temperature == 0:
        return (SamplingParams.from_dict(values),) * params.n
    first = params.seed if params.seed is not None else derive_seed(seed, name)
    seeds = (first if index == 0 else derive_seed(first, index) for index in range(params.n))
    return tuple(SamplingParams.from_dict({**values, "seed": one}) for one in seeds)


def _whole(value: Any) -> Any:
    """Tables with gaps keep whole numbers as fractions."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
