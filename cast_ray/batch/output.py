"""The output folder of a job: what a job may write over, and what the finished files say.

`job.json` is written first and `summary.json` last, so a folder without the latter is not finished. The names of the
Parquet files begin with a tag that stands in `job.json`: what bears another name is not touched.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as pads

from cast_ray.batch.paths import check_writable
from cast_ray.errors import EngineError, InputError, describe

JOB_FILE = "job.json"
SUMMARY_FILE = "summary.json"
_EXCERPT = 5


def check_output(output: Path, inputs: tuple[str, ...], overwrite: bool) -> None:
    """Raise InputError where nothing can be written, or where writing would harm: on other output or on the input."""
    check_writable(output)
    if any(Path(file).parent == output.resolve() or output.resolve() in Path(file).parents for file in inputs):
        raise InputError(describe("output", str(output), "holds the input", "Name another folder"))
    written = written_files(output)
    # Not even beside them: who reads the folder would take them for rows of this job.
    if foreign := sorted(file.name for file in set(output.glob("*.parquet")) - set(written)):
        problem = f"holds Parquet files that no job wrote, such as {foreign[0]}"
        raise InputError(describe("output", str(output), problem, "Name another folder, or move them away"))
    if not overwrite and written:
        raise InputError(
            describe("output", str(output), "already holds output", "Name another folder, or pass --overwrite")
        )


def written_files(output: Path) -> list[Path]:
    """Files there that a job wrote; others are never touched."""
    tag = _tag(output)
    rows = output.glob(f"{tag}_*.parquet") if tag else ()
    return sorted([*rows, *(file for file in (output / JOB_FILE, output / SUMMARY_FILE) if file.exists())])


def _tag(output: Path) -> str | None:
    try:
        tag = json.loads((output / JOB_FILE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tag if isinstance(tag, str) and re.fullmatch(r"\w+", tag) else None


def begin_output(output: Path, job: dict[str, Any]) -> str:
    """An empty folder but for job.json (and files that are none of ours). Returns the tag for the job's files."""
    # The summary goes first: what is left of an old run must not look finished. job.json stays until it is replaced:
    # without its tag what is left of the old run would be nobody's.
    for file in sorted(written_files(output), key=lambda file: file.name != SUMMARY_FILE):
        if file.name != JOB_FILE:
            file.unlink()
    output.mkdir(parents=True, exist_ok=True)
    tag = f"answers_{uuid.uuid4().hex[:12]}"
    write_json(output / JOB_FILE, {**job, "files": tag})
    return tag


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(partial, path)


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


def count_output(output: Path, id_column: str) -> OutputCounts:
    """Read back what was written: the report tells of the files, not of what the job meant to write."""
    counts = OutputCounts()
    seen = array("q")  # eight bytes a row, however long the names are
    columns = ["finish_reason", "num_input_tokens", "num_generated_tokens", "rounds", "error"]
    files = [str(file) for file in written_files(output) if file.suffix == ".parquet"]
    for batch in pads.dataset(files, format="parquet").to_batches(columns=[*columns, id_column]) if files else ():
        for row in batch.to_pylist():
            counts.rows += 1
            seen.append(hash(str(row[id_column])))
            if row["error"] is None:
                counts.input_tokens += row["num_input_tokens"]
                counts.generated_tokens += row["num_generated_tokens"]
                counts.rounds += row["rounds"]
                counts.finish_reasons[row["finish_reason"]] += 1
                continue
            counts.failed += 1
            counts.error_kinds[row["error"].split(":", 1)[0]] += 1
            if len(counts.first_errors) < _EXCERPT:
                counts.first_errors.append({"row": str(row[id_column]), "error": row["error"]})
    counts.names = len(np.unique(np.asarray(seen)))
    return counts


def check_complete(counts: OutputCounts, rows: int, nodes: int) -> None:
    """Raise EngineError unless each of the input's rows was written, and once. nodes: those alive in the cluster."""
    if counts.rows == counts.names == rows:
        return
    written = f"{counts.rows} rows" if counts.rows == counts.names else f"{counts.rows} rows ({counts.names} different)"
    remedy = "If the input did not change meanwhile, run the job again with --overwrite"
    if nodes > 1:
        remedy = f"On a cluster of {nodes} nodes the output must be on storage that every node sees. {remedy}"
    raise EngineError(f"the output has {written} where the input has {rows}. {remedy}")
