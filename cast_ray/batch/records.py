"""Lines of JSONL and text and records of CSV, one after the other: what each holds, or what is wrong with it.

It reads from any iterator of byte lines, so it does not know whether they were packed or where they came from.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cast_ray.errors import InputError, describe

TEXT_COLUMN = "text"
_BOM = b"\xef\xbb\xbf"

# A prompt may be long; what lies between an unclosed quote and the next one should not be endless.
csv.field_size_limit(16 * 2**20)


@dataclass
class Record:
    """One row of a file: where its bytes lie, its 1-based number, and its values or what is wrong with it."""

    start: int
    end: int
    number: int
    values: dict[str, Any]
    error: str | None = None


def read_records(
    kind: str, lines: Iterable[bytes], header: list[str], start: int = 0, first: int = 1
) -> Iterator[Record]:
    """Records of lines that begin at byte `start` with number `first`. kind: jsonl, csv or text; header: of CSV."""
    if kind == "csv":
        return _read_csv(iter(lines), header, start, first)
    return _read_lines(lines, _parse_json if kind == "jsonl" else _parse_text, start, first)


def _read_lines(lines: Iterable[bytes], parse: Any, start: int, first: int) -> Iterator[Record]:
    """A record for every line that is not blank."""
    for number, line in enumerate(lines, first):
        end = start + len(line)
        if line.strip():
            values, error = parse(line.removeprefix(_BOM) if start == 0 else line, number)
            yield Record(start, end, number, values, error)
        start = end


def _parse_text(line: bytes, number: int) -> tuple[dict[str, Any], str | None]:
    try:
        return {TEXT_COLUMN: line.decode("utf-8").rstrip("\r\n")}, None
    except UnicodeDecodeError as error:
        return {}, f"line {number} is not UTF-8 ({error.reason} at byte {error.start}). Mend or remove it"


def _parse_json(line: bytes, number: int) -> tuple[dict[str, Any], str | None]:
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


def csv_header(lines: Iterator[bytes], name: str) -> tuple[list[str], int]:
    """Column names from the first record, and how many bytes it took; an empty file has none."""
    taken = 0

    def counted() -> Iterator[bytes]:
        nonlocal taken
        for line in lines:
            taken += len(line)
            yield line

    records = csv.reader(_decoded(counted()))
    try:
        names = next((record for record in records if not _is_blank(record)), [])
    except csv.Error as error:
        problem = f"has a first line that cannot be read ({error})"
        raise InputError(describe("input", name, problem, "Write the columns' names there")) from None
    if names:
        names[0] = names[0].removeprefix("\ufeff")
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise InputError(describe("input", name, f"has the columns {twice} twice", "Rename them in its first line"))
    if not _is_unicode(names):
        raise InputError(describe("input", name, "has column names that are not UTF-8", "Mend its first line"))
    return names, taken


def _read_csv(lines: Iterator[bytes], header: list[str], start: int, first: int) -> Iterator[Record]:
    """A record for every one that is not blank."""
    end = start
    # Of the bytes, since the fields do not tell a blank line from an empty field in quotes, which is a row.
    blank = True

    def counted() -> Iterator[bytes]:
        nonlocal end, blank
        for line in lines:
            end += len(line)
            blank = blank and not line.strip()
            yield line

    reader = csv.reader(_decoded(counted()))
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
