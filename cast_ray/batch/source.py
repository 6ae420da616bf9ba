"""The planned input as a Ray Data source: every piece of a file is one read task. Reading never fails for a bad row.

Rows that an earlier run has answered are left out here, before anything is computed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from cast_ray.batch.columns import READ_ERROR_COLUMN, ROW_ID_COLUMN, read_cells
from cast_ray.batch.formats import InputPlan, open_arrow, row_ids
from cast_ray.batch.names import Digests, among, digests
from cast_ray.batch.text_formats import PIECE_ROWS, Piece, as_json, read_pieces


@dataclass(frozen=True)
class Reading:
    """What reading a piece takes besides the piece. done: a reference to sorted digests of rows to leave out."""

    filesystem: Any
    kind: str
    schema: pa.Schema
    json_columns: frozenset[str]
    make_row_id: bool
    id_column: str
    user_column: str | None
    done: Any = field(default=None)

    @classmethod
    def of(cls, plan: InputPlan, done: Any = None) -> Reading:
        # Not the plan itself: it lists every piece, and would travel with each of them.
        return cls(
            plan.place.filesystem,
            plan.format,
            plan.schema,
            plan.json_columns,
            plan.make_row_id,
            plan.id_column,
            plan.user_column,
            done,
        )

    @property
    def output_schema(self) -> pa.Schema:
        """The input's columns, and what the reader adds."""
        added = [pa.field(READ_ERROR_COLUMN, pa.string())]
        if self.make_row_id:
            added.append(pa.field(ROW_ID_COLUMN, pa.string()))
        return pa.schema([*self.schema, *added])


class InputSource(Datasource):
    """Ray Data's own readers stop at the first bad line, and know no row numbers."""

    def __init__(self, plan: InputPlan, reading: Reading) -> None:
        super().__init__()
        self._pieces = plan.pieces
        self._reading = reading

    def get_name(self) -> str:
        return f"Input({self._reading.kind})"

    def estimate_inmemory_data_size(self) -> int:
        return sum(piece.size for piece in self._pieces)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One a piece, whatever parallelism asks for: pieces are small."""
        schema = self._reading.output_schema
        return [
            ReadTask(
                _reader(self._reading, piece),
                BlockMetadata(num_rows=piece.rows, size_bytes=piece.size, input_files=[piece.path], exec_stats=None),
                schema=schema,
            )
            for piece in self._pieces
        ]


def _reader(reading: Reading, piece: Piece) -> Callable[[], Iterator[pa.Table]]:
    return lambda: read_tables(reading, piece, None if reading.done is None else ray.get(reading.done))


def read_tables(reading: Reading, piece: Piece, done: Digests | None = None) -> Iterator[pa.Table]:
    """The rows of one piece, in order, without those that are done."""
    place = 0
    for table, numbers in _tables(reading, piece):
        table = _mark_repeats(reading, table, place, piece.repeats)
        if reading.make_row_id:
            table = table.append_column(ROW_ID_COLUMN, row_ids(piece.name, numbers))
        left = piece.rows - place
        place += len(table)
        table = table.slice(0, left)
        if done is not None:
            names, _ = read_cells(reading.id_column, table[reading.id_column])
            table = table.filter(pa.array(~among(digests(names), done)))
        yield table
        if place >= piece.rows:
            return


def _tables(reading: Reading, piece: Piece) -> Iterator[tuple[pa.Table, list[int]]]:
    """With all columns but `row_id`."""
    if reading.kind not in ("parquet", "arrow"):
        yield from read_pieces(reading.filesystem, piece, reading.kind, reading.schema, reading.json_columns)
        return
    number = piece.first
    for batch in _batches(reading, piece):
        for table in (batch.slice(start, PIECE_ROWS) for start in range(0, len(batch), PIECE_ROWS)):
            yield _fit(table, reading), list(range(number, number + len(table)))
            number += len(table)


def _batches(reading: Reading, piece: Piece) -> Iterator[pa.Table]:
    if reading.kind == "arrow":
        with open_arrow(reading.filesystem, piece.path) as batches:
            yield from (pa.Table.from_batches([batch]) for batch in batches)
        return
    with reading.filesystem.open_input_file(piece.path) as source, pq.ParquetFile(source) as parquet:
        for batch in parquet.iter_batches(batch_size=PIECE_ROWS, row_groups=[piece.offset]):
            yield pa.Table.from_batches([batch])


def _fit(table: pa.Table, reading: Reading) -> pa.Table:
    """table in the schema of the whole input, which other files of it may have shaped."""
    columns: list[Any] = []
    for column in reading.schema:
        if column.name not in table.column_names:
            columns.append(pa.nulls(len(table), column.type))
        elif column.name in reading.json_columns:
            values, _ = read_cells(column.name, table[column.name])
            columns.append(pa.array(as_json(column.name, values), column.type))
        else:
            columns.append(table[column.name].cast(column.type))
    fitted = pa.Table.from_arrays(columns, schema=reading.schema)
    return fitted.append_column(READ_ERROR_COLUMN, pa.nulls(len(table), pa.string()))


def _mark_repeats(reading: Reading, table: pa.Table, start: int, repeats: frozenset[int]) -> pa.Table:
    inside = {place - start for place in repeats if start <= place < start + len(table)}
    if not inside:
        return table
    column = reading.user_column
    errors = table[READ_ERROR_COLUMN].to_pylist()
    names = table[column].to_pylist()
    for place in inside:
        problem = f"{column}={names[place]!r} names an earlier row too. Make it unique"
        errors[place] = errors[place] or f"DuplicateId: {problem}"
    at = table.column_names.index(READ_ERROR_COLUMN)
    return table.set_column(at, READ_ERROR_COLUMN, pa.array(errors, pa.string()))


def read_dataset(plan: InputPlan, done: Digests | None = None) -> ray.data.Dataset:
    """A lazy dataset of the planned input. done: sorted digests of the names of rows to leave out."""
    # Once into the object store, not once into every read task.
    reading = Reading.of(plan, ray.put(done) if done is not None and len(done) else None)
    # The count of blocks is said, or Ray Data would cut small pieces into single rows.
    return ray.data.read_datasource(InputSource(plan, reading), override_num_blocks=len(plan.pieces))
