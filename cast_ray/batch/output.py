"""The output folder of a job: what may be written there, what is there already, and what the finished rows say.

`job.json` is written first and `summary.json` last, so a folder without the latter is not finished.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cast_ray.batch.manifest import JOB_FILE, Manifest
from cast_ray.batch.openai_batch import result_line
from cast_ray.batch.parts import Parts, is_part, json_line
from cast_ray.batch.storage import Storage, check_writable
from cast_ray.errors import EngineError, InputError, describe

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
ERRORS_FILE = "errors.jsonl"
# What an OpenAI Batch job ends with, beside the errors.
RESULTS_FILE = "output.jsonl"
_EXCERPT = 5


def check_output(output: Storage, inputs: Iterable[str], manifest: Manifest, overwrite: bool) -> None:
    """Raise InputError where nothing can be written, or where writing would harm: on other output or on the input."""
    check_writable(output)
    # As the input's paths are, with links followed.
    inside = f"{(os.path.realpath(output.path) if output.is_local else output.path).rstrip('/')}/"
    if any(path.startswith(inside) for path in inputs):
        raise InputError(describe("output", output.shown, "holds the input", "Name another folder"))
    there = Manifest.read(output)
    names = [name for name in output.files() if not name.startswith(".")]
    # Not even beside them: who reads the folder would take them for rows of this job.
    ours = JOB_FILE in names
    foreign = [name for name in names if _is_output(name) and not (ours and _is_jobs(name))]
    if foreign:
        problem = f"holds files of rows that no job wrote, such as {foreign[0]}"
        raise InputError(describe("output", output.shown, problem, "Name another folder, or move them away"))
    if overwrite:
        return
    if there is None:
        if JOB_FILE in names or SUMMARY_FILE in names:
            problem = "already holds output of a job that cannot be gone on with"
            raise InputError(describe("output", output.shown, problem, "Name another folder, or pass --overwrite"))
    elif (difference := manifest.unlike(there)) is not None:
        problem = f"already holds output of another job: {difference}"
        raise InputError(describe("output", output.shown, problem, "Name another folder, or pass --overwrite"))


def _is_output(name: str) -> bool:
    return name.endswith(".parquet") or _is_jobs(name)


def _is_jobs(name: str) -> bool:
    return is_part(name) or name in (RESULTS_FILE, ERRORS_FILE)


def clear_output(output: Storage, parts: Parts) -> None:
    """Remove what a job left there, and nothing else."""
    # The summary goes first: what is left of an old run must not look finished. job.json goes last: without it the
    # parts would be nobody's.
    output.remove(SUMMARY_FILE)
    parts.clear()
    for name in (REPORT_FILE, RESULTS_FILE, ERRORS_FILE, JOB_FILE):
        output.remove(name)


def write_json(output: Storage, name: str, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    output.write(name, f"{text}\n".encode())


@dataclass
class OutputCounts:
    """What the written rows add up to. names: different values of the column that names rows."""

    rows: int = 0
    names: int = 0
    failed: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    error_kinds: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    first_errors: list[dict[str, str]] = field(default_factory=list)


def count_output(parts: Parts, id_column: str) -> OutputCounts:
    """Read back what was written: the report tells of the files, not of what the job meant to write."""
    counts = OutputCounts()
    seen = array("q")  # eight bytes a row, however long the names are
    columns = ["finish_reason", "num_input_tokens", "num_generated_tokens", "rounds", "error", id_column]
    for row in parts.all_rows(list(dict.fromkeys(columns))):
        counts.rows += 1
        seen.append(hash(str(row[id_column])))
        if row["error"] is None:
            counts.input_tokens += row["num_input_tokens"]
            counts.generated_tokens += sum(_each(row["num_generated_tokens"]))
            counts.rounds += sum(_each(row["rounds"]))
            counts.finish_reasons.update(_each(row["finish_reason"]))
            continue
        counts.failed += 1
        counts.error_kinds[row["error"].split(":", 1)[0]] += 1
        if len(counts.first_errors) < _EXCERPT:
            counts.first_errors.append({"row": str(row[id_column]), "error": row["error"]})
    counts.names = len(np.unique(np.asarray(seen)))
    return counts


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_complete(counts: OutputCounts, rows: int) -> None:
    """Raise EngineError unless each of the input's rows was written, and once."""
    if counts.rows == counts.names == rows:
        return
    written = f"{counts.rows} rows" if counts.rows == counts.names else f"{counts.rows} rows ({counts.names} different)"
    remedy = "If the input did not change meanwhile, run the job again: it does what is missing"
    raise EngineError(f"the output has {written} where the input has {rows}. {remedy}")


def write_errors(output: Storage, parts: Parts, id_column: str, user_column: str | None) -> None:
    """Every failed row's name and reason, one a line; no such file where none failed."""
    columns = list(dict.fromkeys([id_column, *([user_column] if user_column else []), "error"]))
    failed = (json_line(row) for row in parts.all_rows(columns) if row["error"] is not None)
    _write_unless_empty(output, ERRORS_FILE, failed)


def write_openai(output: Storage, parts: Parts, id_column: str, created: int) -> None:
    """The result and the error file of an OpenAI Batch, from the parts."""
    rows = ((row["error"], result_line(row, str(row[id_column]), created)) for row in parts.all_rows())
    output.write(RESULTS_FILE, (json_line(line) for error, line in rows if error is None))
    rows = ((row["error"], result_line(row, str(row[id_column]), created)) for row in parts.all_rows())
    _write_unless_empty(output, ERRORS_FILE, (json_line(line) for error, line in rows if error is not None))


def _write_unless_empty(output: Storage, name: str, lines: Iterator[bytes]) -> None:
    first = next(lines, None)
    if first is None:
        output.remove(name)
        return

    def all_lines() -> Iterator[bytes]:
        yield first
        yield from lines

    output.write(name, all_lines())
