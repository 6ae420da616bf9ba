"""Batch jobs with the fake engine, for tests of the driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from tests.fake_engine import FakeEngine


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def run(source: Path, output: Path, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and rows of a job with the fake engine."""
    settings.setdefault("engine", {"max_batch_size": 4})
    config = JobConfig(input=str(source), output=str(output), **settings)
    summary = run_job(config, FakeEngine, Console(quiet=True))
    return summary, read_output(output)


def read_output(output: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(output.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
