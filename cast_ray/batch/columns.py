"""The names and types of a job's columns, and which of them names a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from cast_ray.errors import InputError, describe
from cast_ray.pool.rows import RowAnswer

# Explicit types, because a block in which every row failed would otherwise have columns of type null.
OUTPUT_SCHEMA = pa.schema(
    [
        ("generated_text", pa.string()),
        ("finish_reason", pa.string()),
        ("num_input_tokens", pa.int64()),
        ("num_generated_tokens", pa.int64()),
        ("rounds", pa.int64()),
        ("error", pa.string()),
    ]
)
_FIELDS = ("text", "finish_reason", "num_input_tokens", "num_generated_tokens", "rounds", "error")
# Of several samples these are lists; the prompt is one, and so is the reason why a row failed.
_PER_SAMPLE = frozenset({"generated_text", "finish_reason", "num_generated_tokens", "rounds"})
ID_COLUMN = "id"
ROW_ID_COLUMN = "row_id"
ID_COLUMNS = frozenset({ID_COLUMN, ROW_ID_COLUMN, "custom_id"})
# Set by the readers on rows that could not be read; taken out again by the stage.
READ_ERROR_COLUMN = "__cast_ray_read_error"


def output_schema(samples: bool) -> pa.Schema:
    """The output columns. samples: every row has a list of answers."""
    if not samples:
        return OUTPUT_SCHEMA
    return pa.schema(
        [
            (column.name, pa.list_(column.type) if column.name in _PER_SAMPLE else column.type)
            for column in OUTPUT_SCHEMA
        ]
    )


def check_columns(columns: Iterable[str], more: Iterable[str] = ()) -> None:
    """Raise InputError where an input column would be lost under an output column of the same name.

    more: output columns beside the usual ones.
    """
    clash = sorted(set(columns) & {*OUTPUT_SCHEMA.names, *more})
    if clash:
        problem = f"{'is' if len(clash) == 1 else 'are'} also written by the job"
        raise InputError(describe("input columns", clash, problem, "Rename in the input, or drop it there"))


def identity_column(columns: Iterable[str]) -> str | None:
    """The column that names a row: `row_id`, else `id`, else None."""
    names = set(columns)
    return next((name for name in (ROW_ID_COLUMN, ID_COLUMN) if name in names), None)


def read_cells(name: str, column: pa.ChunkedArray) -> tuple[list[Any], dict[int, str]]:
    """A column's values, and by row what is wrong with those that Python cannot hold, which are None.

    Such as text that is not UTF-8: Parquet files may hold it, and Arrow passes it on unseen.
    """
    try:
        return column.to_pylist(), {}
    except (ValueError, OverflowError):
        values: list[Any] = []
    problems: dict[int, str] = {}
    for row, cell in enumerate(column):
        try:
            values.append(cell.as_py())
        except (ValueError, OverflowError) as error:
            values.append(None)
            problems[row] = f"column {name} cannot be read ({error}). Mend or remove the row"
    return values, problems


def append_outputs(table: pa.Table, answers: Sequence[Sequence[RowAnswer]], samples: bool = False) -> pa.Table:
    """table with the output columns filled from the answers of every row, in the same order.

    A row of which any sample failed has that sample's error, and no outputs.
    """
    failures = [next((answer for answer in row if answer.error is not None), None) for row in answers]
    for column, field in zip(output_schema(samples), _FIELDS, strict=True):
        values: list[Any] = []
        for row, failure in zip(answers, failures, strict=True):
            if failure is None and samples and column.name in _PER_SAMPLE:
                values.append([getattr(answer, field) for answer in row])
            else:
                values.append(getattr(failure or row[0], field))
        table = table.append_column(column, pa.array(values, column.type))
    return table
