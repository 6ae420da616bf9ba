"""Where a job's rows come from: look through the input's files once, and say what columns and rows they hold.

Everything that makes the whole input unusable is an InputError here, before any process is started. What is wrong with
a row stays with the row. Reading the rows themselves is `source`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cast_ray.batch.columns import ID_COLUMN, ROW_ID_COLUMN, read_cells
from cast_ray.batch.find import InputFile, find_files
from cast_ray.batch.names import Digests, join, repeats
from cast_ray.batch.openai_batch import CUSTOM_ID, is_openai_batch
from cast_ray.batch.storage import Storage
from cast_ray.batch.text_formats import Piece, Scan, id_digests, merge_types, no_nulls, scan_text
from cast_ray.errors import InputError, describe

# The part of the rows that a column must tell apart before its repeats count as mistakes.
_MOSTLY = 0.9


@dataclass(frozen=True)
class InputPlan:
    """What a job will read. schema: the input's columns. json_columns: those of mixed types, kept as JSON text.

    make_row_id: no column names every row, so the reader adds `row_id`, the file's name and the row's number in it.
    id_column: the column that names every row. user_column: the one that people know the rows by, or None.
    is_openai: the rows are requests of an OpenAI Batch file.
    """

    place: Storage
    format: str
    files: tuple[InputFile, ...]
    pieces: tuple[Piece, ...]
    schema: pa.Schema
    json_columns: frozenset[str]
    rows: int
    make_row_id: bool
    id_column: str
    user_column: str | None
    is_openai: bool

    def first(self, rows: int) -> InputPlan:
        """The plan of the first rows only."""
        pieces: list[Piece] = []
        left = rows
        for piece in self.pieces:
            if left > 0:
                pieces.append(replace(piece, rows=min(piece.rows, left)))
                left -= piece.rows
        return replace(self, pieces=tuple(pieces), rows=min(rows, self.rows))


def plan_input(path: str | Path | Storage, id_column: str | None = None) -> InputPlan:
    """Look through the input. id_column: a column whose repeated and empty values are errors of their rows.

    Raises InputError for what is missing, empty, or of no known format.
    """
    place = path if isinstance(path, Storage) else Storage.of("input", str(path))
    files = find_files(place)
    kinds = sorted({file.kind for file in files})
    if len(kinds) > 1:
        problem = f"holds {' and '.join(kinds)} files"
        raise InputError(describe("input", place.shown, problem, "Name one kind with a glob, as 'data/*.jsonl'"))
    candidates = [id_column] if id_column else [ROW_ID_COLUMN, ID_COLUMN, CUSTOM_ID]
    scans = [_scan(place, file, candidates) for file in files]
    rows = sum(scan.rows for scan in scans)
    if rows == 0:
        raise InputError(describe("input", place.shown, "has no rows", "Check that it is the right file"))
    types = _common_types(scans, kinds[0])
    is_openai = kinds[0] == "jsonl" and is_openai_batch(types)
    if is_openai:
        # As it stands in the file: Arrow would give every body the keys of all others.
        types["body"] = None
    schema = pa.schema([(name, pa.string() if kind is None else kind) for name, kind in types.items()])
    if not schema.names:
        problem = f"has no readable row ({rows} bad ones)"
        raise InputError(describe("input", place.shown, problem, "Write one JSON object a line"))
    if id_column and id_column not in schema.names:
        problem = f"is no column of the input. Columns there: {', '.join(schema.names)}"
        raise InputError(describe("id_column", id_column, problem, "Name one of these, or leave it out"))
    user_column, perfect, again = _naming_column(scans, schema, candidates, required=id_column is not None)
    pieces = tuple(piece for scan in scans for piece in scan.pieces)
    return InputPlan(
        place=place,
        format=kinds[0],
        files=tuple(files),
        pieces=tuple(_with_repeats(pieces, again)),
        schema=schema,
        json_columns=frozenset(name for name, kind in types.items() if kind is None),
        rows=rows,
        make_row_id=not perfect,
        id_column=user_column if perfect and user_column else ROW_ID_COLUMN,
        user_column=user_column,
        is_openai=is_openai,
    )


def _scan(place: Storage, file: InputFile, id_columns: Sequence[str]) -> Scan:
    try:
        if file.kind == "parquet":
            return _scan_parquet(place, file, id_columns)
        if file.kind == "arrow":
            return _scan_arrow(place, file, id_columns)
        return scan_text(place.filesystem, file.path, file.name, file.kind, id_columns)
    except pa.ArrowException as error:
        kind = file.kind.capitalize()
        problem = f"is not a readable {kind} file ({' '.join(str(error).split())})"
        raise InputError(describe("input", file.path, problem, "Write it again, or leave it out")) from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror or ' '.join(str(error).split())})"
        raise InputError(describe("input", file.path, problem, "Check the file and its permissions")) from None


def _scan_parquet(place: Storage, file: InputFile, id_columns: Sequence[str]) -> Scan:
    with place.filesystem.open_input_file(file.path) as source, pq.ParquetFile(source) as parquet:
        scan = _scan_schema(file, parquet.schema_arrow, id_columns)
        scan.rows = parquet.metadata.num_rows
        first = 1
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            if about.num_rows:
                scan.pieces.append(Piece(file.path, file.name, group, about.total_byte_size, first, about.num_rows))
            first += about.num_rows
        for column in scan.ids:
            for batch in parquet.iter_batches(columns=[column]):
                scan.ids[column].append(_column_digests(column, batch))
    return scan


def _scan_arrow(place: Storage, file: InputFile, id_columns: Sequence[str]) -> Scan:
    with open_arrow(place.filesystem, file.path) as batches:
        scan = _scan_schema(file, batches.schema, id_columns)
        for batch in batches:
            scan.rows += len(batch)
            for column in scan.ids:
                scan.ids[column].append(_column_digests(column, batch))
    if scan.rows:
        scan.pieces.append(Piece(file.path, file.name, 0, file.size, 1, scan.rows))
    return scan


@contextmanager
def open_arrow(filesystem: Any, path: str) -> Iterator[Any]:
    """A reader over the batches of an Arrow stream, which `datasets` writes, or of an Arrow file."""
    with filesystem.open_input_file(path) as source:
        start = source.read(6)
        source.seek(0)
        if start == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            yield pa.RecordBatchReader.from_batches(reader.schema, batches)
        else:
            yield pa.ipc.open_stream(source)


def _scan_schema(file: InputFile, schema: pa.Schema, id_columns: Sequence[str]) -> Scan:
    scan = Scan(types={column.name: column.type for column in schema})
    if len(scan.types) < len(schema):
        raise InputError(describe("input", file.path, "has two columns of one name", "Rename one"))
    scan.ids = {name: [] for name in id_columns if name in scan.types and not pa.types.is_nested(scan.types[name])}
    return scan


def _column_digests(column: str, batch: pa.RecordBatch) -> Digests:
    return id_digests(read_cells(column, pa.chunked_array([batch.column(column)]))[0])


def _common_types(scans: Sequence[Scan], kind: str) -> dict[str, pa.DataType | None]:
    types: dict[str, pa.DataType | None] = {}
    for scan in scans:
        for name, found in scan.types.items():
            types[name] = merge_types(types.get(name, found), found)
    if kind in ("parquet", "arrow"):
        return types
    return {name: found if found is None else no_nulls(found) for name, found in types.items()}


def _naming_column(
    scans: Sequence[Scan], schema: pa.Schema, candidates: Sequence[str], required: bool
) -> tuple[str | None, bool, Any]:
    """The column by which people know the rows, whether it names every one, and places of rows that repeat a name.

    Raises InputError where `row_id` is there and names no rows: a made one would have to take its place.
    """
    best: tuple[str | None, bool, Any] = None, False, np.array([], np.int64)
    for column in candidates:
        if column not in schema.names or pa.types.is_floating(schema.field(column).type):
            continue
        names = join(part for scan in scans for part in scan.ids.get(column) or [np.full(scan.rows, b"", "S16")])
        places = np.flatnonzero(names != b"")
        again = places[repeats(names[places])]
        distinct = len(places) - len(again)
        if distinct == len(names):
            return column, True, again
        if best[0] is None and (required or distinct >= _MOSTLY * len(names)):
            best = column, False, again
    if ROW_ID_COLUMN in schema.names:
        problem = "is null or the same in several rows"
        raise InputError(describe("column", ROW_ID_COLUMN, problem, "Make it unique, or rename it and one is made"))
    return best


def _with_repeats(pieces: Sequence[Piece], again: Any) -> Iterator[Piece]:
    start = 0
    for piece in pieces:
        low, high = np.searchsorted(again, [start, start + piece.rows])
        inside = frozenset(int(place) - start for place in again[low:high])
        yield replace(piece, repeats=inside) if inside else piece
        start += piece.rows


def row_ids(name: str, numbers: Sequence[int]) -> pa.Array:
    """`file:000000001`: sorts in the order of the input, and is the same wherever the input lies."""
    return pc.binary_join_element_wise(name, pa.array([f"{number:09d}" for number in numbers], pa.string()), ":")
