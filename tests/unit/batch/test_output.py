"""A job's folder: nothing of others is touched, nothing unfinished looks finished, and the report adds up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cast_ray.batch.columns import append_outputs
from cast_ray.batch.driver import SAMPLE_INPUT, JobConfig, run_job
from cast_ray.batch.formats import plan_input
from cast_ray.batch.output import begin_output, check_output, count_output
from cast_ray.config import load_settings
from cast_ray.errors import ConfigError, InputError
from cast_ray.pool.rows import RowAnswer
from cast_ray.stats.report import JobTimes, render, summarise
from tests.fake_engine import fake_stats

ANSWERS = [
    RowAnswer("one", "stop", 10, 4, 2),
    RowAnswer("two", "length", 20, 8, 2),
    RowAnswer.failed("InvalidPrompt", "prompt=None: is null. Give the row a prompt"),
]


def write_rows(output: Path) -> None:
    output.mkdir()
    pq.write_table(append_outputs(pa.table({"id": ["a", "b", "c"]}), ANSWERS), output / "part.parquet")


def test_only_a_jobs_own_files_are_replaced(tmp_path: Path) -> None:
    write_rows(tmp_path / "out")
    for name in ("summary.json", "job.json", "notes.txt"):
        (tmp_path / "out" / name).write_text("{}")
    begin_output(tmp_path / "out", {"demo": False})
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["job.json", "notes.txt"]
    assert json.loads((tmp_path / "out" / "job.json").read_text()) == {"demo": False}


def test_an_output_that_would_harm_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "out")
    inputs = (str(tmp_path / "out" / "part.parquet"),)
    with pytest.raises(InputError, match="already holds output"):
        check_output(tmp_path / "out", (), overwrite=False)
    check_output(tmp_path / "out", (), overwrite=True)
    for output in (tmp_path / "out", tmp_path):
        with pytest.raises(InputError, match="holds the input"):
            check_output(output, inputs, overwrite=True)
    with pytest.raises(InputError, match="is a file"):
        check_output(tmp_path / "out" / "part.parquet", (), overwrite=True)


def test_the_summary_adds_up_what_was_written(tmp_path: Path) -> None:
    write_rows(tmp_path / "out")
    counts = count_output(tmp_path / "out", "id")
    actors = {
        "engine-0": {"name": "engine-0", "node": "n", "restarted": True, "engine": fake_stats(2, 12)},
        "engine-1": {"name": "engine-1", "engine": None, "cause": "ModelError: gone"},
    }
    summary = summarise(vars(counts), actors, JobTimes(1.0, 4.0, 5.0), {"output": "out"})
    assert summary["rows"] == 3
    assert summary["failed"] == 1
    assert summary["errors_by_kind"] == {"InvalidPrompt": 1}
    assert summary["first_errors"] == [{"row": "c", "error": ANSWERS[2].error}]
    assert summary["finish_reasons"] == {"length": 1, "stop": 1}
    assert summary["generated_tokens"] == 12
    assert summary["tokens_per_s"] == 3.0
    assert summary["mean_round_length"] == 3.0
    assert set(summary["versions"]) >= {"cast_ray", "torch", "transformers", "ray"}
    first, lost = summary["actors"]
    assert first["state"] == "restarted"
    assert first["share"] == {"draft": 0.1, "verify": 0.7, "host": 0.05, "prefill": 0.15}
    assert first["verify_ms_at_width"] == [{"batch": 1, "context": 0, "nodes": 3, "ms_root": 10.0, "ms": 11.0}]
    assert lost == {"name": "engine-1", "state": "lost", "cause": "ModelError: gone"}
    json.dumps(summary)

    console = Console(width=160, file=io.StringIO())
    console.print(render(summary))
    shown = console.file.getvalue()
    for words in ("3 (2 answered)", "1 (1 InvalidPrompt)", "3.0 tokens/s", "N*=3", "10.0 and 11.0", "10% 70% 5% 15%"):
        assert words in shown
    assert "engine-0 (restarted)" in shown
    assert "lost: ModelError: gone" in shown
    assert "c  InvalidPrompt: prompt=None: is null" in shown


def test_the_sample_prompts_are_a_dataset_of_every_kind() -> None:
    plan = plan_input(SAMPLE_INPUT)
    assert plan.rows == 24
    assert plan.schema.names == ["id", "messages"]
    assert not plan.make_row_id


def test_an_input_without_an_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output=None: is missing"):
        run_job(JobConfig(input=str(tmp_path)))


def test_flags_win_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text("max_tokens: 20\nseed: 2\nengine: {width: chain}\n")
    monkeypatch.setenv("CAST_RAY_SEED", "3")
    monkeypatch.setenv("CAST_RAY_TEMPERATURE", "0.5")
    said: dict[str, Any] = {"max_tokens": 30, "engine": {"dtype": "float32", "width": None}, "pool": {"replicas": None}}
    config = load_settings(JobConfig, tmp_path / "job.yaml", said)
    assert (config.max_tokens, config.seed, config.temperature) == (30, 2, 0.5)
    assert (config.engine.width, config.engine.dtype, config.pool.replicas) == ("chain", "float32", None)
