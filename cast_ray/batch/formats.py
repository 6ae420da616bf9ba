"""Where a job's rows come from: find the files, look through them once, and say what columns and rows they hold.

Local paths; Parquet, JSONL and CSV; a file, a folder or a glob. Everything that makes the whole input unusable is an
InputError here, before any process is started. Reading the rows themselves is `source`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cast_ray.batch.columns import ID_COLUMN, ROW_ID_COLUMN, read_cells
from cast_ray.batch.paths import check_local
from cast_ray.batch.text_formats import Piece, Scan, merge_types, no_nulls, scan_text
from cast_ray.errors import InputError, describe

FORMATS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
_READABLE = "Readable are .parquet, .jsonl and .csv"


@dataclass(frozen=True)
class InputPlan:
    """What a job will read. schema: the input's columns. json_columns: those of mixed types, kept as JSON text.

    make_row_id: no column names every row, so the reader adds `row_id`, the file's name and the row's number in it.
    id_column: the column that names every row, `row_id` or `id`.
    """

    path: str
    format: str
    files: tuple[str, ...]
    pieces: tuple[Piece, ...]
    schema: pa.Schema
    json_columns: frozenset[str]
    rows: int
    make_row_id: bool
    id_column: str


def plan_input(path: str | Path) -> InputPlan:
    """Look through the input. Raises InputError for what is missing, empty, or of no known format."""
    files = find_files(str(path))
    kinds = sorted({FORMATS[file.suffix.lower()] for file, _ in files})
    if len(kinds) > 1:
        problem = f"holds {' and '.join(kinds)} files"
        raise InputError(describe("input", str(path), problem, "Name one kind with a glob, as 'data/*.jsonl'"))
    scans = [_scan(file, name, kinds[0]) for file, name in files]
    rows = sum(scan.rows for scan in scans)
    if rows == 0:
        raise InputError(describe("input", str(path), "has no rows", "Check that it is the right file"))
    types = _common_types(files, scans, kinds[0])
    schema = pa.schema([(name, pa.string() if kind is None else kind) for name, kind in types.items()])
    if not schema.names:
        problem = f"has no readable row ({rows} bad ones)"
        raise InputError(describe("input", str(path), problem, "Write one JSON object a line"))
    id_column = _naming_column(scans, schema)
    return InputPlan(
        path=str(path),
        format=kinds[0],
        files=tuple(str(file) for file, _ in files),
        pieces=tuple(piece for scan in scans for piece in scan.pieces),
        schema=schema,
        json_columns=frozenset(name for name, kind in types.items() if kind is None),
        rows=rows,
        make_row_id=id_column is None,
        id_column=id_column or ROW_ID_COLUMN,
    )


def find_files(path: str) -> list[tuple[Path, str]]:
    """The files that path names, in order, each with a name that is unique within the input."""
    check_local("input", path)
    given = Path(path)
    if given.is_file():
        if given.suffix.lower() not in FORMATS:
            problem = f"has the unknown extension {given.suffix!r}" if given.suffix else "has no extension"
            raise InputError(describe("input", path, problem, _READABLE))
        return [(given.resolve(), given.name)]
    if given.is_dir():
        root, found = given, [file for file in given.rglob("*") if file.is_file()]
    elif glob.has_magic(path):
        found = [Path(file) for file in glob.glob(path, recursive=True) if Path(file).is_file()]
        if not found:
            raise InputError(describe("input", path, "matches no file", "Check the pattern, and quote it in a shell"))
        root = Path(os.path.commonpath([file.parent for file in found]))
    else:
        raise InputError(describe("input", path, "does not exist", f"Check the path (from {Path.cwd()})"))
    names = {file: file.relative_to(root).as_posix() for file in found}
    usable = [file for file in found if file.suffix.lower() in FORMATS]
    if given.is_dir():
        # Hidden and underscored names are markers of other tools, as in every Parquet reader.
        usable = [file for file in usable if not any(part[0] in "._" for part in names[file].split("/"))]
    if not usable:
        raise InputError(describe("input", path, "holds no readable file", _READABLE))
    return sorted(((file.resolve(), names[file]) for file in usable), key=lambda pair: pair[1])


def _scan(file: Path, name: str, kind: str) -> Scan:
    try:
        if kind == "parquet":
            return _scan_parquet(file, name)
        return scan_text(file, name, kind == "csv", (ID_COLUMN, ROW_ID_COLUMN))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise InputError(describe("input", str(file), problem, "Check the file and its permissions")) from None
    except pa.ArrowException as error:
        problem = f"is not a readable Parquet file ({' '.join(str(error).split())})"
        raise InputError(describe("input", str(file), problem, "Write it again, or leave it out")) from None


def _scan_parquet(file: Path, name: str) -> Scan:
    scan = Scan()
    with pq.ParquetFile(file) as parquet:
        scan.rows = parquet.metadata.num_rows
        scan.types = {column.name: column.type for column in parquet.schema_arrow}
        if len(scan.types) < len(parquet.schema_arrow):
            raise InputError(describe("input", str(file), "has two columns of one name", "Rename one"))
        first = 1
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            if about.num_rows:
                scan.pieces.append(Piece(str(file), name, group, about.total_byte_size, first, about.num_rows))
            first += about.num_rows
        for column in (ID_COLUMN, ROW_ID_COLUMN):
            if column in scan.types and not pa.types.is_nested(scan.types[column]):
                scan.ids[column], _ = read_cells(column, parquet.read([column])[column])
    return scan


def _common_types(files: list[tuple[Path, str]], scans: list[Scan], kind: str) -> dict[str, pa.DataType | None]:
    types: dict[str, pa.DataType | None] = {}
    for (file, _), scan in zip(files, scans, strict=True):
        for name, found in scan.types.items():
            before = types.get(name, found)
            types[name] = merge_types(before, found)
            if types[name] is None and kind == "parquet":
                problem = f"has column {name} as {found}, and files before it as {before}"
                raise InputError(describe("input", str(file), problem, "Give all files one schema"))
    if kind != "parquet":
        types = {name: found if found is None else no_nulls(found) for name, found in types.items()}
    return types


def _naming_column(scans: Sequence[Scan], schema: pa.Schema) -> str | None:
    """The column that names every row by itself, or None. Raises InputError where `row_id` is there and does not."""
    for column in (ROW_ID_COLUMN, ID_COLUMN):
        if column in schema.names and _names_rows([scan.ids.get(column) for scan in scans], schema.field(column).type):
            return column
    if ROW_ID_COLUMN in schema.names:
        problem = "is null or the same in several rows"
        raise InputError(describe("column", ROW_ID_COLUMN, problem, "Make it unique, or rename it and one is made"))
    return None


def _names_rows(ids: list[list[Any] | None], kind: pa.DataType) -> bool:
    seen: set[str] = set()
    count = 0
    for part in ids:
        for value in part if part is not None else [None]:
            if value is None or isinstance(value, list | dict):
                return False
            # As it will be written: large whole numbers may become equal as fractions.
            seen.add(str(float(value) if pa.types.is_floating(kind) else value))
            count += 1
    return len(seen) == count > 0


def row_ids(name: str, numbers: Sequence[int]) -> pa.Array:
    """`file:000000001`: sorts in the order of the input, and is the same wherever the input lies."""
    return pc.binary_join_element_wise(name, pa.array([f"{number:09d}" for number in numbers], pa.string()), ":")
