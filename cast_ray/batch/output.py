"""The output folder of a job: what a job may write over, and what the finished files say.

`job.json` is written first and `summary.json` last, so a folder without the latter is not finished.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads

from cast_ray.errors import InputError, describe

JOB_FILE = "job.json"
SUMMARY_FILE = "summary.json"
_EXCERPT = 5


def check_output(output: Path, inputs: tuple[str, ...], overwrite: bool) -> None:
    """Raise InputError where writing would harm: on other output, on the input itself, or on a file."""
    if output.exists() and not output.is_dir():
        raise InputError(describe("output", str(output), "is a file", "Name a folder"))
    if any(Path(file).parent == output.resolve() or output.resolve() in Path(file).parents for file in inputs):
        raise InputError(describe("output", str(output), "holds the input", "Name another folder"))
    if not overwrite and written_files(output):
        raise InputError(
            describe("output", str(output), "already holds output", "Name another folder, or pass --overwrite")
        )


def written_files(output: Path) -> list[Path]:
    """Files there that a job writes; others are never touched."""
    if not output.is_dir():
        return []
    return sorted([*output.glob("*.parquet"), *(f for f in (output / JOB_FILE, output / SUMMARY_FILE) if f.exists())])


def begin_output(output: Path, job: dict[str, Any]) -> None:
    """An empty folder but for job.json (and files that are none of ours)."""
    # The summary goes first: what is left of an old run must not look finished.
    for file in sorted(written_files(output), key=lambda file: file.name != SUMMARY_FILE):
        file.unlink()
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / JOB_FILE, job)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(partial, path)


@dataclass
class OutputCounts:
    """What the written rows add up to."""

    rows: int = 0
    failed: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    error_kinds: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    first_errors: list[dict[str, str]] = field(default_factory=list)


def count_output(output: Path, id_column: str | None) -> OutputCounts:
    """Read back what was written: the report tells of the files, not of what the job meant to write."""
    counts = OutputCounts()
    columns = ["finish_reason", "num_input_tokens", "num_generated_tokens", "rounds", "error"]
    files = [str(file) for file in written_files(output) if file.suffix == ".parquet"]
    wanted = columns + ([id_column] if id_column else [])
    for batch in pads.dataset(files, format="parquet").to_batches(columns=wanted) if files else ():
        for row in batch.to_pylist():
            counts.rows += 1
            if row["error"] is None:
                counts.input_tokens += row["num_input_tokens"]
                counts.generated_tokens += row["num_generated_tokens"]
                counts.rounds += row["rounds"]
                counts.finish_reasons[row["finish_reason"]] += 1
                continue
            counts.failed += 1
            counts.error_kinds[row["error"].split(":", 1)[0]] += 1
            if len(counts.first_errors) < _EXCERPT:
                name = str(row[id_column]) if id_column else ""
                counts.first_errors.append({"row": name, "error": row["error"]})
    return counts
