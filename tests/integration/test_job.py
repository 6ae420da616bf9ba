"""The batch job on a real local Ray cluster: every row once, bad rows apart, clear refusals, and deaths survived.

The faults are a fake engine's, since a real one has none to order; the last test runs the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.batch.pipeline import build_pipeline
from cast_ray.config import BatchConfig
from cast_ray.errors import EngineError, InputError, ModelError
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("ray_cluster")


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


def test_two_replicas_answer_every_row_once_and_the_order_comes_back_by_id(tmp_path: Path) -> None:
    rows = [{"id": index, "prompt": f"row number {index}", "label": None} for index in range(200)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)

    summary, written = run(source, tmp_path / "out", pool={"replicas": 2}, batch_size=8)

    written.sort(key=lambda row: row["id"])
    assert [row["id"] for row in written] == list(range(200))
    assert [row["generated_text"] for row in written] == [f"ROW NUMBER {index}" for index in range(200)]
    assert {row["error"] for row in written} == {None}
    assert [actor["name"] for actor in summary["actors"]] == ["engine-0", "engine-1"]
    assert all(actor["requests_finished"] > 0 for actor in summary["actors"])
    assert summary["rows"] == summary["answered"] == 200
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())


def test_rows_without_ids_get_row_ids_in_the_order_of_the_input(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for part in range(2):
        write_jsonl(folder / f"part-{part}.jsonl", [{"prompt": f"{part} {index}"} for index in range(30)])

    _, written = run(folder, tmp_path / "out", batch_size=4)

    written.sort(key=lambda row: row["row_id"])
    assert [row["prompt"] for row in written] == [f"{part} {index}" for part in range(2) for index in range(30)]


def test_bad_rows_get_errors_and_the_others_are_answered(tmp_path: Path) -> None:
    rows: list[Any] = [{"id": f"good-{index}", "prompt": f"good {index}"} for index in range(20)]
    rows[3:3] = [
        {"id": "null", "prompt": None},
        {"id": "empty", "prompt": "  "},
        {"id": "number", "prompt": 7},
        {"id": "absent"},
        {"id": "long", "prompt": "reject this"},
        {"id": "unexpected", "prompt": "strange thing"},
        '{"id": "broken", "prompt": "cut',
        "[1, 2]",
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)

    summary, written = run(source, tmp_path / "out", batch_size=4)

    good = [row for row in written if row["error"] is None]
    assert sorted(row["id"] for row in good) == sorted(f"good-{index}" for index in range(20))
    errors = {row["id"] or row["row_id"]: row["error"] for row in written if row["error"] is not None}
    assert set(errors) == {
        "null", "empty", "number", "absent", "long", "unexpected", "in.jsonl:000000010", "in.jsonl:000000011",
    }  # fmt: skip
    assert "is null" in errors["null"]
    assert "is empty" in errors["empty"]
    assert "a number, not text" in errors["number"]
    assert "longer than the context" in errors["long"]
    assert "line 10 is not JSON" in errors["in.jsonl:000000010"]
    assert "line 11 is JSON but no object" in errors["in.jsonl:000000011"]
    assert all(row["generated_text"] is None for row in written if row["error"] is not None)
    kinds = {"InvalidPrompt": 4, "KeyError": 1, "RequestError": 1, "UnreadableRow": 2}
    assert summary["errors_by_kind"] == kinds
    assert summary["failed"] == 8
    assert len(summary["first_errors"]) == 5


def test_parquet_columns_keep_their_types_where_every_row_failed_too(tmp_path: Path) -> None:
    import datetime
    import decimal

    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "prompt": ["reject", "reject"],
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "when": pa.array([datetime.datetime(2024, 1, 2), None], pa.timestamp("us")),
            "tags": pa.array([["a"], []], pa.list_(pa.string())),
            "raw": pa.array([b"\xff", None], pa.binary()),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "nothing": pa.nulls(2),
            "meta": pa.array([{"a": 1, "b": None}, None], pa.struct([("a", pa.int8()), ("b", pa.float32())])),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")

    run(tmp_path / "in.parquet", tmp_path / "out")

    (file,) = (tmp_path / "out").glob("*.parquet")
    written = pq.read_table(file)
    assert written.select(table.column_names).sort_by("id").to_pylist() == table.to_pylist()
    assert [written.schema.field(name).type for name in table.column_names] == table.schema.types
    assert str(written.schema.field("generated_text").type) == "string"
    assert str(written.schema.field("rounds").type) == "int64"


def test_text_that_is_not_utf8_costs_its_own_row_only(tmp_path: Path) -> None:
    prompts = pa.array([b"fine" if index != 7 else b"\xff" for index in range(40)]).view(pa.string())
    labels = pa.array([b"\xfe"] * 40).view(pa.string())
    pq.write_table(pa.table({"id": range(40), "prompt": prompts, "label": labels}), tmp_path / "in.parquet")

    summary = run_job(
        JobConfig(input=str(tmp_path / "in.parquet"), output=str(tmp_path / "out"), batch_size=4),
        FakeEngine,
        Console(quiet=True),
    )

    assert summary["answered"] == 39
    (failed,) = summary["first_errors"]
    assert failed["row"] == "7"
    assert failed["error"].startswith("UnreadableRow: column prompt cannot be read ('utf-8' codec")


def test_a_row_that_kills_its_engine_is_given_up_and_its_neighbours_are_answered(tmp_path: Path) -> None:
    rows = [{"id": index, "prompt": f"fine {index}"} for index in range(40)]
    rows[11]["prompt"] = "poison"
    source = write_jsonl(tmp_path / "in.jsonl", rows)

    summary, written = run(source, tmp_path / "out", pool={"replicas": 2, "row_attempts": 2}, batch_size=8)

    errors = {row["id"]: row["error"] for row in written if row["error"] is not None}
    assert list(errors) == [11]
    assert errors[11].startswith("EngineDied: 2 engines died while they held this row")
    assert sorted(row["id"] for row in written) == list(range(40))
    assert summary["failed"] == 1


def test_a_row_that_breaks_the_engine_inside_its_process_is_given_up_too(tmp_path: Path) -> None:
    rows = [{"id": index, "prompt": f"fine {index}"} for index in range(20)]
    rows[5]["prompt"] = "break"
    source = write_jsonl(tmp_path / "in.jsonl", rows)

    _, written = run(source, tmp_path / "out", pool={"replicas": 1, "row_attempts": 2}, batch_size=4)

    assert [row["id"] for row in written if row["error"] is not None] == [5]
    assert len(written) == 20


def test_no_engine_left_ends_the_job_with_the_cause_and_without_a_summary(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "poison"}, {"prompt": "fine"}])

    with pytest.raises(EngineError, match="no engine is left") as raised:
        run(source, tmp_path / "out", pool={"replicas": 1, "max_restarts": 0})

    assert "Traceback" not in str(raised.value)
    assert not (tmp_path / "out" / "summary.json").exists()


def test_engines_that_cannot_start_raise_their_own_error_before_anything_is_written(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "fine"}])

    with pytest.raises(ModelError, match="target='missing': does not exist"):
        run(source, tmp_path / "out", engine={"target": "missing"}, pool={"replicas": 2})

    assert not (tmp_path / "out").exists()


def test_output_of_an_earlier_job_is_kept_unless_overwrite_is_said(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "prompt": "first"}])
    output = tmp_path / "out"
    run(source, output)
    (output / "notes.txt").write_text("mine")
    write_jsonl(source, [{"id": 1, "prompt": "second"}])

    with pytest.raises(InputError, match="already holds output"):
        run(source, output)
    assert [row["generated_text"] for row in read_output(output)] == ["FIRST"]

    run(source, output, overwrite=True)
    assert [row["generated_text"] for row in read_output(output)] == ["SECOND"]
    assert (output / "notes.txt").read_text() == "mine"


def test_a_pipeline_answers_any_dataset_between_pre_and_postprocess() -> None:
    import ray

    dataset = ray.data.from_items([{"question": f"why {index}", "n": index} for index in range(20)])
    config = BatchConfig(batch_size=4)

    with build_pipeline(
        config,
        preprocess=lambda row: {**row, "prompt": f"please {row['question']}"},
        postprocess=lambda row: {"n": row["n"], "answer": row["generated_text"]},
        engine_factory=FakeEngine,
    ) as pipeline:
        rows = pipeline(dataset).take_all()

    assert sorted(rows, key=lambda row: row["n"]) == [{"n": n, "answer": f"PLEASE WHY {n}"} for n in range(20)]


def script(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The script as a person runs it, on a cluster of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CAST_RAY_", "RAY_"))}
    command = [sys.executable, str(ROOT / "jobs" / "batch_generate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment, check=False)


@pytest.mark.parametrize("cpus", [1, 2])
def test_a_cluster_of_few_cpus_does_not_hang_however_many_engines_it_has(tmp_path: Path, cpus: int) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": index, "prompt": f"row {index}"} for index in range(300)])
    code = f"""
import logging, ray
from rich.console import Console
from cast_ray.batch.driver import JobConfig, run_job
from tests import fake_engine
ray.cloudpickle.register_pickle_by_value(fake_engine)
ray.init(address="local", num_cpus={cpus}, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
config = JobConfig(input={str(source)!r}, output={str(tmp_path / "out")!r}, pool={{"replicas": 4}}, batch_size=4)
run_job(config, fake_engine.FakeEngine, Console(quiet=True))
ray.shutdown()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600, check=True)
    assert sorted(row["id"] for row in read_output(tmp_path / "out")) == list(range(300))


def test_the_script_ends_with_one_line_and_exit_code_2_for_a_missing_file(tmp_path: Path) -> None:
    done = script("--input", "absent.jsonl", "--output", "out", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: input='absent.jsonl': does not exist")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_job_answers_with_the_real_engine_on_two_replicas(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"id": index, "messages": [{"role": "user", "content": f"Name the number after {index}."}]}
        for index in range(200)
    ]
    rows[17]["messages"][0]["content"] = "word " * 10_000
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    config = JobConfig(
        input=str(source),
        output=str(tmp_path / "out"),
        max_tokens=6,
        pool={"replicas": 2},
        engine={"dtype": "float32", "width": "fixed:7"},
    )

    summary = run_job(config, console=Console(quiet=True))

    written = sorted(read_output(tmp_path / "out"), key=lambda row: row["id"])
    assert [row["id"] for row in written] == list(range(200))
    assert [row["id"] for row in written if row["error"] is not None] == [17]
    assert all(row["generated_text"].strip() for row in written if row["error"] is None)
    assert all(1 <= row["num_generated_tokens"] <= 6 for row in written if row["error"] is None)
    assert sum(actor["tokens_generated"] for actor in summary["actors"]) == summary["generated_tokens"]
    assert all(actor["requests_finished"] > 0 for actor in summary["actors"])
