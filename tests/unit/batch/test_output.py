"""A job's folder: nothing of others is touched, nothing unfinished looks finished, and the report adds up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from cast_ray.batch.columns import append_outputs
from cast_ray.batch.driver import SAMPLE_INPUT, JobConfig, run_job
from cast_ray.batch.formats import plan_input
from cast_ray.batch.lock import only_job
from cast_ray.batch.manifest import Manifest
from cast_ray.batch.output import check_complete, check_output, clear_output, count_output
from cast_ray.batch.parts import PartFormat, Parts
from cast_ray.batch.storage import Storage
from cast_ray.errors import ConfigError, EngineError, InputError
from cast_ray.pool.rows import RowAnswer
from cast_ray.settings import load_settings
from cast_ray.stats.report import JobTimes, render, summarise
from tests.fake_engine import fake_stats

ANSWERS = [
    RowAnswer("one", "stop", 10, 4, 2),
    RowAnswer("two", "length", 20, 8, 2),
    RowAnswer.failed("InvalidPrompt", "prompt=None: is null. Give the row a prompt"),
]


def place(path: Path) -> Storage:
    return Storage.of("output", str(path))


def parts(path: Path, kind: PartFormat = "parquet") -> Parts:
    return Parts(place(path), kind, "id")


def manifest(**answers: Any) -> Manifest:
    return Manifest({"max_tokens": 5, **answers}, {"in.jsonl": "7-abc"})


def write_rows(output: Path, ids: tuple[str, ...] = ("a", "b", "c")) -> str:
    """The part of a job's three rows."""
    manifest().write(place(output))
    return parts(output).append(append_outputs(pa.table({"id": ids}), [[answer] for answer in ANSWERS]))


def test_only_a_jobs_own_files_are_removed(tmp_path: Path) -> None:
    write_rows(tmp_path)
    for name in ("summary.json", "errors.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}")
    clear_output(place(tmp_path), parts(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("of_a_job", "name"),
    [(True, "mine.parquet"), (False, "mine.parquet"), (False, "part-000000.jsonl"), (False, "output.jsonl")],
)
def test_rows_that_no_job_wrote_are_never_touched(tmp_path: Path, of_a_job: bool, name: str, overwrite: bool) -> None:
    if of_a_job:
        write_rows(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"files of rows that no job wrote, such as {name}\. Name another folder"):
        check_output(place(tmp_path), (), manifest(), overwrite)


def test_only_the_same_job_goes_on_in_a_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    file = output / write_rows(output)
    check_output(place(output), (), manifest(), overwrite=False)
    for other, difference in (
        (manifest(max_tokens=6), r"max_tokens is 5 there and 6 here"),
        (manifest(regex="a"), r'regex is null there and "a" here'),
        (Manifest({"max_tokens": 5}, {"in.jsonl": "8-abc"}), "its input in.jsonl was another file, or has changed"),
        (Manifest({"max_tokens": 5}, {}), "its input has a file in.jsonl that is not in this one"),
        (Manifest({"max_tokens": 5}, {"in.jsonl": "7-abc", "b.jsonl": ""}), "its input lacks the file b.jsonl"),
    ):
        with pytest.raises(InputError, match=f"already holds output of another job: {difference}"):
            check_output(place(output), (), other, overwrite=False)
        check_output(place(output), (), other, overwrite=True)
    for folder in (output, tmp_path):
        with pytest.raises(InputError, match="holds the input"):
            check_output(place(folder), (str(file),), manifest(), overwrite=True)


def test_a_job_file_that_cannot_be_read_is_not_gone_on_with(tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "job.json").write_text('{"version": 99}')
    with pytest.raises(InputError, match="of a job that cannot be gone on with"):
        check_output(place(tmp_path), (), manifest(), overwrite=False)
    check_output(place(tmp_path), (), manifest(), overwrite=True)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        check_output(place(tmp_path / "file"), (), manifest(), overwrite=True)
    with pytest.raises(InputError, match=r"out': lies below .*file, which is a file\. Name a folder"):
        check_output(place(tmp_path / "file" / "deep" / "out"), (), manifest(), overwrite=False)
    with pytest.raises(InputError, match="cannot be written"):
        check_output(place(Path("/proc/out")), (), manifest(), overwrite=False)
    check_output(place(tmp_path / "deep" / "out"), (), manifest(), overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_jobs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        only_job(place(tmp_path / "out")),
        pytest.raises(InputError, match="is being written to by another job"),
        only_job(place(tmp_path / "out")),
    ):
        pass
    with only_job(place(tmp_path / "out")):
        pass


def test_rows_that_are_missing_or_there_twice_are_found_in_the_output(tmp_path: Path) -> None:
    write_rows(tmp_path)
    check_complete(count_output(parts(tmp_path), "id"), 3)
    with pytest.raises(EngineError, match="the output has 3 rows where the input has 4"):
        check_complete(count_output(parts(tmp_path), "id"), 4)
    write_rows(tmp_path, ("d", "e", "e"))
    with pytest.raises(EngineError, match=r"has 6 rows \(5 different\) where the input has 6"):
        check_complete(count_output(parts(tmp_path), "id"), 6)


def test_the_summary_adds_up_what_was_written(tmp_path: Path) -> None:
    write_rows(tmp_path / "out")
    counts = count_output(parts(tmp_path / "out"), "id")
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
    assert (lost["name"], lost["state"], lost["cause"]) == ("engine-1", "lost", "ModelError: gone")
    json.dumps(summary)

    console = Console(width=160, file=io.StringIO())
    console.print(render(summary))
    shown = console.file.getvalue()
    for words in ("3 (2 answered)", "1 (1 InvalidPrompt)", "3.0 tokens/s", "N*=3", "10.0 and 11.0", "10% 70% 5% 15%"):
        assert words in shown
    assert "engine-0 (restarted)" in shown
    assert "lost: ModelError: gone" in shown
    assert "c  InvalidPrompt: prompt=None: is null" in shown


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        ({"width": "deployment", "calibrated": True, "chosen": [{"batch": 1, "context": 0, "nodes": 3}]}, "N*=3 "),
        (
            {"width": "deployment", "calibrated": False, "chosen": [{"batch": 1, "context": 0, "nodes": 3}]},
            "N=3 (calibrating)",
        ),
        ({"width": "deployment", "calibrated": False, "chosen": []}, "deployment (calibrating)"),
        ({"width": "deployment", "calibrated": True, "chosen": []}, "deployment  "),
        ({"width": "fixed:7", "max_nodes": 7}, "fixed:7 (N=7)"),
    ],
)
def test_a_width_is_shown_as_what_it_is(tmp_path: Path, width: dict[str, Any], shown: str) -> None:
    write_rows(tmp_path)
    actor = {"name": "engine-0", "engine": {**fake_stats(2, 12), "width": width}}
    counts = count_output(parts(tmp_path), "id")
    console = Console(width=160, file=io.StringIO())
    console.print(render(summarise(vars(counts), {"engine-0": actor}, JobTimes(1.0, 4.0, 5.0), {})))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("engine-0")]
    assert shown in line
    assert "10.0" in line


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
