"""The planned input as a Ray Data source: every piece of a file is one read task. Reading never fails for a bad row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from cast_ray.batch.columns import READ_ERROR_COLUMN, ROW_ID_COLUMN
from cast_ray.batch.formats import InputPlan, row_ids
from cast_ray.batch.text_formats import PIECE_ROWS, Piece, read_piece


class InputSource(Datasource):
    """Ray Data's own readers stop at the first bad line, and know no row numbers."""

    def __init__(self, plan: InputPlan) -> None:
        super().__init__()
        self._plan = plan

    def get_name(self) -> str:
        return f"Input({self._plan.format})"

    def estimate_inmemory_data_size(self) -> int:
        return sum(piece.size for piece in self._plan.pieces)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One a piece, whatever parallelism asks for: pieces are small."""
        schema = read_schema(self._plan)
        return [
            ReadTask(
                _reader(self._plan, piece),
                BlockMetadata(num_rows=piece.rows, size_bytes=piece.size, input_files=[piece.path], exec_stats=None),
                schema=schema,
            )
            for piece in self._plan.pieces
        ]


def _reader(plan: InputPlan, piece: Piece) -> Callable[[], Iterator[pa.Table]]:
    # Not the plan itself: it lists every piece, and would travel with each of them.
    kind, schema, json_columns, make_row_id = plan.format, plan.schema, plan.json_columns, plan.make_row_id
    return lambda: read_tables(piece, kind, schema, json_columns, make_row_id)


def read_schema(plan: InputPlan) -> pa.Schema:
    """The schema of what is read: the input's columns, and what the reader adds."""
    added = [pa.field(READ_ERROR_COLUMN, pa.string())] if plan.format != "parquet" else []
    if plan.make_row_id:
        added.append(pa.field(ROW_ID_COLUMN, pa.string()))
    return pa.schema([*plan.schema, *added])


def read_tables(
    piece: Piece, kind: str, schema: pa.Schema, json_columns: frozenset[str], make_row_id: bool
) -> Iterator[pa.Table]:
    """The rows of one piece, in order."""
    for table, numbers in _tables(piece, kind, schema, json_columns):
        yield table.append_column(ROW_ID_COLUMN, row_ids(piece.name, numbers)) if make_row_id else table


def _tables(
    piece: Piece, kind: str, schema: pa.Schema, json_columns: frozenset[str]
) -> Iterator[tuple[pa.Table, list[int]]]:
    if kind != "parquet":
        yield read_piece(piece, kind == "csv", schema, json_columns)
        return
    number = piece.first
    with pq.ParquetFile(piece.path) as parquet:
        for batch in parquet.iter_batches(batch_size=PIECE_ROWS, row_groups=[piece.offset]):
            table = pa.Table.from_batches([batch])
            for column in schema:
                if column.name not in table.column_names:
                    table = table.append_column(column, pa.nulls(len(table), column.type))
            yield table.select(schema.names).cast(schema), list(range(number, number + len(table)))
            number += len(table)


def read_dataset(plan: InputPlan) -> ray.data.Dataset:
    """A lazy dataset of the planned input."""
    # The count of blocks is said, or Ray Data would cut small pieces into single rows.
    return ray.data.read_datasource(InputSource(plan), override_num_blocks=len(plan.pieces))
