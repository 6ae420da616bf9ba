"""JSONL and CSV, tolerant of bad rows: scan a file once for its columns and pieces, then read any piece by itself.

A line that cannot be read becomes a row with READ_ERROR_COLUMN set and every other column null. Columns of JSONL whose
values have no common type are kept as JSON text. Every CSV column is text, so nothing of it is lost ("007").
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from cast_ray.batch.columns import READ_ERROR_COLUMN
from cast_ray.errors import InputError, describe

PIECE_ROWS = 1024
PIECE_BYTES = 4 * 2**20
_BOM = b"\xef\xbb\xbf"

# A prompt may be long; what lies between an unclosed quote and the next one should not be endless.
csv.field_size_limit(16 * 2**20)


@dataclass(frozen=True)
class Piece:
    """A part of a file that one task reads. first: 1-based number of its first line, record or row."""

    path: str
    name: str
    offset: int
    size: int
    first: int
    rows: int


@dataclass
class Record:
    """One line of JSONL or one record of CSV: where it lies, its number, and its values or what is wrong with it."""

    start: int
    end: int
    number: int
    values: dict[str, Any]
    error: str | None = None


@dataclass
class Scan:
    """What one pass over a file found. types: None for a column whose values have no common type."""

    pieces: list[Piece] = field(default_factory=list)
    types: dict[str, pa.DataType | None] = field(default_factory=dict)
    ids: dict[str, list[Any]] = field(default_factory=dict)
    rows: int = 0


def scan_text(path: Path, name: str, is_csv: bool, id_columns: Iterable[str]) -> Scan:
    """One pass over the file in bounded memory (values of id_columns are kept). Raises OSError."""
    scan = Scan(ids={column: [] for column in id_columns})
    with path.open("rb") as file:
        if is_csv:
            scan.types = dict.fromkeys(csv_header(file, name), pa.string())
            records = read_csv(file, list(scan.types))
        else:
            records = read_jsonl(file)
        held: list[Record] = []
        for record in records:
            held.append(record)
            if len(held) >= PIECE_ROWS or record.end - held[0].start >= PIECE_BYTES:
                _add_piece(scan, path, name, held, is_csv)
                held = []
        if held:
            _add_piece(scan, path, name, held, is_csv)
    return scan


def _add_piece(scan: Scan, path: Path, name: str, records: list[Record], is_csv: bool) -> None:
    start, end = records[0].start, records[-1].end
    scan.pieces.append(Piece(str(path), name, start, end - start, records[0].number, len(records)))
    scan.rows += len(records)
    for column, values in scan.ids.items():
        values.extend(record.values.get(column) for record in records)
    if not is_csv:
        for column in dict.fromkeys(name for record in records for name in record.values):
            found = infer_type([record.values.get(column) for record in records])
            scan.types[column] = merge_types(scan.types[column], found) if column in scan.types else found


def infer_type(values: list[Any]) -> pa.DataType | None:
    """The Arrow type that holds all values, None where there is none that Parquet can also write."""
    try:
        found = pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
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
    except (pa.ArrowInvalid, pa.ArrowTypeError):
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


def read_piece(
    piece: Piece, is_csv: bool, schema: pa.Schema, json_columns: frozenset[str]
) -> tuple[pa.Table, list[int]]:
    """The piece's rows as a table of schema and READ_ERROR_COLUMN, and each row's number in its file."""
    with open(piece.path, "rb") as file:
        header = csv_header(file, piece.name) if is_csv else []
        file.seek(piece.offset)
        part = io.BytesIO(file.read(piece.size))
    records = list(read_csv(part, header, piece.first) if is_csv else read_jsonl(part, piece.first))
    arrays = []
    for column in schema:
        values = [record.values.get(column.name) for record in records]
        if column.name in json_columns:
            values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        arrays.append(_array(values, column.type))
    arrays.append(pa.array([record.error for record in records], pa.string()))
    names = [*schema.names, READ_ERROR_COLUMN]
    return pa.Table.from_arrays(arrays, names=names), [record.number for record in records]


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


def read_jsonl(file: BinaryIO, first: int = 1) -> Iterator[Record]:
    """A record for every line that is not blank."""
    start = file.tell()
    for number, line in enumerate(file, first):
        end = start + len(line)
        if line.strip():
            values, error = _parse_line(line.removeprefix(_BOM) if start == 0 else line, number)
            yield Record(start, end, number, values, error)
        start = end


def _parse_line(line: bytes, number: int) -> tuple[dict[str, Any], str | None]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return {}, f"line {number} is not UTF-8 ({error.reason} at byte {error.start}). Mend or remove it"
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        return {}, f"line {number} is not JSON ({error.msg} at column {error.colno}). Mend or remove it"
    except UnicodeEncodeError:
        return {}, f"line {number} has half of a surrogate pair (\\ud800-\\udfff). Mend or remove it"
    except (ValueError, RecursionError) as error:
        return {}, f"line {number} cannot be read ({error}). Mend or remove it"
    if not isinstance(value, dict):
        return {}, f"line {number} is JSON but no object. Write one object a line"
    return value, None


def csv_header(file: BinaryIO, name: str) -> list[str]:
    """Column names from the first record; leaves the file behind it. An empty file has none."""
    records = csv.reader(_decoded(iter(file.readline, b"")))
    names = next((record for record in records if not _is_blank(record)), [])
    if names:
        names[0] = names[0].removeprefix("\ufeff")
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise InputError(describe("input", name, f"has the columns {twice} twice", "Rename them in its first line"))
    return names


def read_csv(file: BinaryIO, header: list[str], first: int = 1) -> Iterator[Record]:
    """A record for every one that is not blank; `file` stands behind the header or at the start of a record."""
    start = end = file.tell()
    # Of the bytes, since the fields do not tell a blank line from an empty field in quotes, which is a row.
    blank = True

    def lines() -> Iterator[bytes]:
        nonlocal end, blank
        for line in iter(file.readline, b""):
            end += len(line)
            blank = blank and not line.strip()
            yield line

    reader = csv.reader(_decoded(lines()))
    number = first
    while True:
        problem = None
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fields, problem = [], f"cannot be read ({error})"
        if problem or not blank:
            if problem is None and len(fields) != len(header):
                problem = f"has {len(fields)} fields where the header has {len(header)}"
            elif problem is None and not _is_unicode(fields):
                problem = "is not UTF-8"
            error_text = f"record {number} {problem}. Mend or remove it" if problem else None
            yield Record(start, end, number, {} if problem else dict(zip(header, fields, strict=True)), error_text)
            number += 1
        start, blank = end, True


def _decoded(lines: Iterator[bytes]) -> Iterator[str]:
    # Undecodable bytes come through as surrogates, so that only their own record is bad.
    return (line.decode("utf-8", errors="surrogateescape") for line in lines)


def _is_blank(fields: list[str]) -> bool:
    return len(fields) <= 1 and not "".join(fields).strip()


def _is_unicode(fields: list[str]) -> bool:
    try:
        "".join(fields).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
