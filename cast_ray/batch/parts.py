"""The rows that a job has written, as numbered part files: what is there is done, so the output is the checkpoint.

A part appears whole or not at all. Where a row stands in two parts (it was run again after an error), the newer one
holds; `settle` takes the older ones out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cast_ray.batch.names import Digests, digests, join, repeats
from cast_ray.batch.storage import Storage

PartFormat = Literal["parquet", "jsonl"]
_NAME = re.compile(r"part-(\d{6,})\.(parquet|jsonl)")


class Parts:
    """The parts in one folder. kind: what new ones are written as. json_columns: columns that hold JSON text, which
    are written as what they mean. id_column: the one that names every row."""

    def __init__(
        self, place: Storage, kind: PartFormat, id_column: str, json_columns: frozenset[str] = frozenset()
    ) -> None:
        self.place = place
        self._kind = kind
        self._id_column = id_column
        self._json_columns = json_columns

    def names(self) -> list[str]:
        """Of the parts there, oldest first."""
        return sorted((name for name in self.place.files() if _NAME.fullmatch(name)), key=_number)

    def append(self, table: pa.Table) -> str:
        """Write a new part, safe from a crash once this returns, and return its name."""
        names = self.names()
        name = f"part-{_number(names[-1]) + 1 if names else 0:06d}.{self._kind}"
        self.place.write(name, self._packed(self._meant(table)))
        return name

    def rows(self, name: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of a part, with the columns named or all."""
        if name.endswith(".jsonl"):
            for line in self.place.read(name).splitlines():
                row = json.loads(line)
                yield row if columns is None else {column: row.get(column) for column in columns}
            return
        with self.place.filesystem.open_input_file(self.place.join(name)) as file, pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(columns=list(columns) if columns is not None else None):
                for start in range(0, len(batch), 1024):
                    yield from batch.slice(start, 1024).to_pylist()

    def all_rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        for name in self.names():
            yield from self.rows(name, columns)

    def done(self, retry_errors: bool) -> Digests:
        """Sorted digests of the names of rows that need not be run (again)."""
        found = [
            digests(
                row[self._id_column]
                for row in self.rows(name, [self._id_column, "error"])
                if not (retry_errors and row["error"] is not None)
            )
            for name in self.names()
        ]
        return np.unique(join(found))

    def settle(self) -> int:
        """Take out rows that stand in a newer part too, and return how many they were.

        Every part is replaced whole, so a job killed meanwhile loses nothing and does the rest the next time.
        """
        names = self.names()[::-1]
        found = [digests(row[self._id_column] for row in self.rows(name, [self._id_column])) for name in names]
        old = repeats(join(found))
        start = 0
        for name, part in zip(names, found, strict=True):
            low, high = np.searchsorted(old, [start, start + len(part)])
            if low < high:
                keep = np.ones(len(part), dtype=bool)
                keep[old[low:high] - start] = False
                self._keep(name, keep)
            start += len(part)
        return len(old)

    def clear(self) -> None:
        for name in self.names():
            self.place.remove(name)

    def _keep(self, name: str, keep: npt.NDArray[np.bool_]) -> None:
        if not keep.any():
            self.place.remove(name)
        elif name.endswith(".jsonl"):
            lines = self.place.read(name).splitlines(keepends=True)
            self.place.write(name, b"".join(line for line, kept in zip(lines, keep, strict=True) if kept))
        else:
            with self.place.filesystem.open_input_file(self.place.join(name)) as file:
                table = pq.read_table(file)
            self.place.write(name, _parquet(table.filter(pa.array(keep))))

    def _meant(self, table: pa.Table) -> pa.Table:
        """table with the JSON text of strings as the strings; other values of mixed columns stay JSON text."""
        for column in self._json_columns.intersection(table.column_names):
            if self._kind == "parquet":
                values = [_string(value) for value in table[column].to_pylist()]
                table = table.set_column(table.column_names.index(column), column, pa.array(values, pa.string()))
        return table

    def _packed(self, table: pa.Table) -> bytes:
        if self._kind == "parquet":
            return _parquet(table)
        rows = table.to_pylist()
        for column in self._json_columns.intersection(table.column_names):
            for row in rows:
                row[column] = _value(row[column])
        return b"".join(json_line(row) for row in rows)


def is_part(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def json_line(row: dict[str, Any]) -> bytes:
    """One line of JSONL; bytes as base64, and what JSON does not know as text."""
    return (json.dumps(row, ensure_ascii=False, default=_text) + "\n").encode("utf-8", "replace")


def _text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _string(text: str | None) -> str | None:
    value = _value(text)
    return value if isinstance(value, str) else text


def _value(text: str | None) -> Any:
    try:
        return json.loads(text) if text is not None else None
    except ValueError:
        return text
