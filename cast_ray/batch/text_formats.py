"""JSONL, CSV and text files, tolerant of bad rows: scan a file once for columns and pieces, then read any piece.

A line that cannot be read becomes a row with READ_ERROR_COLUMN set and every other column null. Columns of JSONL whose
values have no common type are kept as JSON text. Every CSV column is text, so nothing of it is lost ("007").
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from cast_ray.batch.columns import ID_COLUMNS, READ_ERROR_COLUMN
from cast_ray.batch.names import Digests, digests
from cast_ray.batch.records import TEXT_COLUMN, Record, csv_header, read_records
from cast_ray.batch.storage import CODECS, open_from_start, open_seekable

PIECE_ROWS = 1024
PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Piece:
    """A part of a file that one task reads. offset, size: its bytes (a row group's index and bytes in Parquet).

    first: 1-based number of its first line, record or row. repeats: places in it, from 0, of rows whose id stood
    earlier in the input.
    """

    path: str
    name: str
    offset: int
    size: int
    first: int
    rows: int
    repeats: frozenset[int] = frozenset()


@dataclass
class Scan:
    """What one pass over a file found. types: None for a column whose values have no common type.

    ids: for each column that may name rows, digests of its values; an empty one where there is none.
    """

    pieces: list[Piece] = field(default_factory=list)
    types: dict[str, pa.DataType | None] = field(default_factory=dict)
    ids: dict[str, list[Digests]] = field(default_factory=dict)
    rows: int = 0


def scan_text(filesystem: Any, path: str, name: str, kind: str, id_columns: Iterable[str]) -> Scan:
    """One pass over the file in bounded memory (sixteen bytes a row and id column are kept). Raises OSError."""
    scan = Scan(ids={column: [] for column in id_columns})
    header: list[str] = []
    start = 0
    with open_from_start(filesystem, path) as file:
        if kind == "csv":
            header, start = csv_header(iter(file), name)
        scan.types = dict.fromkeys([TEXT_COLUMN] if kind == "text" else header, pa.string())
        held: list[Record] = []
        for record in read_records(kind, file, header, start):
            held.append(record)
            if len(held) >= PIECE_ROWS or record.end - held[0].start >= PIECE_BYTES:
                _add_piece(scan, path, name, held, kind)
                held = []
        if held:
            _add_piece(scan, path, name, held, kind)
    if is_packed(path) and len(scan.pieces) > 1:
        # No part of a packed file can be had without unpacking all before it, so one task reads the whole.
        scan.pieces = [Piece(path, name, 0, sum(piece.size for piece in scan.pieces), 1, scan.rows)]
    return scan


def is_packed(path: str) -> bool:
    return Path(path).suffix.lower() in CODECS


def _add_piece(scan: Scan, path: str, name: str, records: list[Record], kind: str) -> None:
    start, end = records[0].start, records[-1].end
    scan.pieces.append(Piece(path, name, start, end - start, records[0].number, len(records)))
    scan.rows += len(records)
    for column, parts in scan.ids.items():
        parts.append(id_digests([record.values.get(column) for record in records]))
    if kind == "jsonl":
        for column in dict.fromkeys(name for record in records for name in record.values):
            found = infer_type([record.values.get(column) for record in records])
            scan.types[column] = merge_types(scan.types[column], found) if column in scan.types else found


def id_digests(values: list[Any]) -> Digests:
    """Digests of a column's values; an empty one where a value names nothing."""
    found = digests(values)
    for place, value in enumerate(values):
        if value is None or value == "" or isinstance(value, list | dict):
            found[place] = b""
    return found


def infer_type(values: list[Any]) -> pa.DataType | None:
    """The Arrow type that holds all values, None where there is none that Parquet can also write."""
    try:
        found = pa.array(values).type
    except (pa.ArrowException, OverflowError, ValueError):
        return None
    return None if _has_empty_struct(found) else found


def _has_empty_struct(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_empty_struct(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_empty_struct(kind.field(i).type) for i in range(kind.num_fields))
    return False


def merge_types(left: pa.DataType | None, right: pa.DataType | None) -> pa.DataType | None:
    """The common type of two, None where there is none."""
    if left is None or right is None:
        return None
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (left, right)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("column").type
    except pa.ArrowException:
        return None


def no_nulls(kind: pa.DataType) -> pa.DataType:
    """kind with text where nothing but nulls was seen, for readers that do not know the null type."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(no_nulls(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(kind.field(i).name, no_nulls(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def read_pieces(
    filesystem: Any, piece: Piece, kind: str, schema: pa.Schema, json_columns: frozenset[str]
) -> Iterator[tuple[pa.Table, list[int]]]:
    """The piece's rows as tables of schema and READ_ERROR_COLUMN, and each row's number in its file."""
    if is_packed(piece.path):
        with open_from_start(filesystem, piece.path) as file:
            header, start = csv_header(iter(file), piece.name) if kind == "csv" else ([], 0)
            records = read_records(kind, file, header, start)
            while held := list(itertools.islice(records, PIECE_ROWS)):
                yield _table(held, schema, json_columns), [record.number for record in held]
        return
    with open_seekable(filesystem, piece.path) as file:
        header = csv_header(iter(file), piece.name)[0] if kind == "csv" else []
        file.seek(piece.offset)
        part = io.BytesIO(file.read(piece.size))
    held = list(read_records(kind, part, header, piece.offset, piece.first))
    yield _table(held, schema, json_columns), [record.number for record in held]


def _table(records: list[Record], schema: pa.Schema, json_columns: frozenset[str]) -> pa.Table:
    arrays = []
    for column in schema:
        values = [record.values.get(column.name) for record in records]
        if column.name in json_columns:
            values = as_json(column.name, values)
        arrays.append(_array(values, column.type))
    errors = [record.error and f"UnreadableRow: {record.error}" for record in records]
    return pa.Table.from_arrays([*arrays, pa.array(errors, pa.string())], names=[*schema.names, READ_ERROR_COLUMN])


def as_json(column: str, values: list[Any]) -> list[str | None]:
    """Values as JSON text, but for names of rows, which stay as they are written."""
    plain = column in ID_COLUMNS
    return [
        value
        if value is None or (plain and isinstance(value, str))
        else json.dumps(value, ensure_ascii=False, default=str)
        for value in values
    ]


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except pa.ArrowInvalid:
        # Whole numbers above 2**53 in a column that elsewhere has fractions.
        return pa.array([_as_floats(value, kind) for value in values], kind)


def _as_floats(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_floating(kind) and isinstance(value, int):
        return float(value)
    if pa.types.is_list(kind) and isinstance(value, list):
        return [_as_floats(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {key: _as_floats(item, kind.field(key).type) for key, item in value.items()}
    return value
