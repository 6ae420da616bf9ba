"""The batch job on a real local Ray cluster: every row once, bad rows apart, clear refusals, and deaths survived.

The faults are a fake engine's, since a real one has none to order; the last test runs the real one.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.batch.pipeline import build_pipeline
from cast_ray.config import BatchConfig
from cast_ray.errors import DrafterError, EngineError, InputError, ModelError
from tests.fake_engine import FakeEngine
from tests.jobs import read_output, run, write_jsonl
from tests.support import qwen3, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("ray_cluster")


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


def test_a_run_in_which_no_row_is_answered_names_no_speed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": index, "prompt": "reject"} for index in range(4)])
    summary, _ = run(source, tmp_path / "out")
    assert (summary["failed"], summary["rows_now"], summary["tokens_per_s"]) == (4, 4, None)
    # And of those that are left of a longer job, when nothing is left.
    assert run(source, tmp_path / "out")[0]["tokens_per_s"] is None


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


def test_output_of_another_job_is_kept_unless_overwrite_is_said(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "prompt": "first"}])
    output = tmp_path / "out"
    run(source, output)
    (output / "notes.txt").write_text("mine")
    write_jsonl(source, [{"id": 1, "prompt": "second"}])

    with pytest.raises(InputError, match=r"already holds output of another job: its input in\.jsonl was another file"):
        run(source, output)
    assert [row["generated_text"] for row in read_output(output)] == ["FIRST"]

    run(source, output, overwrite=True)
    assert [row["generated_text"] for row in read_output(output)] == ["SECOND"]
    assert (output / "notes.txt").read_text() == "mine"


def test_a_pilot_is_gone_on_with_and_a_finished_job_has_nothing_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": index, "prompt": f"row {index}"} for index in range(60)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out"

    pilot, written = run(source, output, batch_size=4, limit=10)
    assert sorted(row["id"] for row in written) == list(range(10))
    assert (pilot["rows_now"], pilot["rows_left"]) == (10, 50)
    assert pilot["projected_s"] > 0
    again, _ = run(source, output, batch_size=4, limit=10)
    assert (again["rows_now"], again["actors"]) == (0, [])

    whole, written = run(source, output, batch_size=8)
    assert whole["rows_now"] == 50
    assert sorted(row["id"] for row in written) == list(range(60))
    assert whole["projected_s"] is None

    def no_engines(*_: Any) -> None:
        raise AssertionError("engines were started")

    monkeypatch.setattr("cast_ray.pool.pool.EnginePool.__init__", no_engines)
    done, after = run(source, output)
    assert (done["rows"], done["rows_now"]) == (60, 0)
    assert after == written
    with pytest.raises(InputError, match="max_tokens is 256 there and 5 here"):
        run(source, output, max_tokens=5)


def test_an_openai_batch_file_is_answered_in_its_own_format(tmp_path: Path) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    def line(custom_id: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}

    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": "s"}, {"role": "user", "content": text}]

    rows: list[Any] = [line(f"c{index}", {"messages": chat(f"hello {index}")}) for index in range(20)]
    rows += [
        line("text", {"prompt": "some text here", "max_tokens": 2}, "/v1/completions"),
        line("three", {"messages": chat("many"), "n": 3, "temperature": 1, "max_completion_tokens": 9}),
        line("parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]}),
        line("c3", {"messages": chat("the same id")}),
        line("where", {"messages": chat("x")}, "/v1/embeddings"),
        line("heat", {"messages": chat("x"), "temperature": "hot"}),
        line("unknown", {"messages": chat("x"), "heat": 1}),
        line("rejected", {"messages": chat("reject")}),
        line("stream", {"messages": chat("x"), "stream": True}),
        "{broken",
    ]
    source = write_jsonl(tmp_path / "batch.jsonl", rows)

    summary, _ = run(source, tmp_path / "out", batch_size=4)

    assert (summary["answered"], summary["failed"]) == (23, 7)
    results = [json.loads(text) for text in (tmp_path / "out" / "output.jsonl").read_text().splitlines()]
    answers: dict[str, Any] = {}
    for result in results:
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        kind = Completion if result["custom_id"] == "text" else ChatCompletion
        answers[result["custom_id"]] = kind.model_validate(result["response"]["body"], strict=True)
    assert len({result["id"] for result in results}) == len(answers) == 23
    assert answers["c7"].choices[0].message.content == "HELLO 7"
    assert answers["c7"].choices[0].message.role == "assistant"
    assert answers["c7"].model == "m"
    assert answers["c7"].usage.total_tokens == answers["c7"].usage.prompt_tokens + 2
    assert answers["text"].choices[0].text == "SOME TEXT"
    assert [choice.index for choice in answers["three"].choices] == [0, 1, 2]
    assert answers["parts"].choices[0].message.content == "IN PARTS"
    errors = [json.loads(text) for text in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert sorted(str(error["custom_id"]) for error in errors) == [
        "None", "c3", "heat", "rejected", "stream", "unknown", "where",
    ]  # fmt: skip
    assert {error["error"]["code"] for error in errors} == {
        "DuplicateId", "InvalidPrompt", "InvalidSampling", "RequestError", "UnreadableRow",
    }  # fmt: skip
    assert all(error["response"] is None and error["error"]["message"] for error in errors)


def test_samples_equal_rows_and_jsonl_by_url(tmp_path: Path) -> None:
    rows = [{"id": index, "prompt": f"row {index % 5}", "note": index if index % 2 else "even"} for index in range(40)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    settings: dict[str, Any] = {"batch_size": 4, "dedupe": True, "group_prefixes": True, "temperature": 1.0, "n": 2}
    config = JobConfig(
        input=f"file://{source}",
        output=f"file://{tmp_path}/out",
        output_format="jsonl",
        engine={"max_batch_size": 4},
        **settings,
    )
    summary = run_job(config, FakeEngine, Console(quiet=True))

    written = [
        json.loads(line) for file in (tmp_path / "out").glob("part-*.jsonl") for line in file.read_text().splitlines()
    ]
    assert sorted(row["id"] for row in written) == list(range(40))
    assert all(row["generated_text"] == [f"ROW {row['id'] % 5}"] * 2 for row in written)
    assert all(row["note"] == (row["id"] if row["id"] % 2 else "even") for row in written)
    assert sum(actor["requests_finished"] for actor in summary["actors"]) == 10


def test_a_dry_run_shows_the_prompt_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_tiny_model(tmp_path / "model", qwen3())
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "word": None}, {"id": 2, "word": "t5 t6"}])
    monkeypatch.setattr("cast_ray.pool.pool.EnginePool.__init__", lambda *_: pytest.fail("engines were started"))
    console = Console(file=io.StringIO(), width=120)
    config = JobConfig(
        input=str(source),
        output=str(tmp_path / "out"),
        dry_run=True,
        template="t3 {{ word }}",
        chat=False,
        engine={"target": str(target)},
    )

    plan = run_job(config, console=console)

    assert (plan["rows"], plan["left_to_do"], plan["first_row"], plan["prompt"]) == (2, 2, "2", "t3 t5 t6")
    assert plan["prompt_tokens"] == 3
    shown = console.file.getvalue()
    assert "Prompt of row 2 (3 tokens):\nt3 t5 t6" in shown
    assert f"  target           {target} (qwen3, " in shown
    assert "  drafter          none\n  width            ar, and not joint\n" in shown
    assert "  warning          no drafter is known for target" in shown
    assert "  sampling         max_tokens: 256, temperature: 0.0, seed: 0, n: 1\n" in shown
    assert not set("[]{}'").intersection(shown.partition("Prompt of row")[0].replace(f"'{target}'", ""))
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_a_drafter_that_is_not_there(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "model", qwen3())
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "prompt": "t5 t6"}])
    absent = str(tmp_path / "absent")
    with pytest.raises(DrafterError, match=f"drafter='{absent}': is no folder. Give a DFlash folder"):
        run_job(JobConfig(input=str(source), dry_run=True, engine={"target": str(target), "drafter": absent}))


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


@pytest.mark.parametrize("cpus", [1, pytest.param(2, marks=pytest.mark.slow)])
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
        for index in range(60)
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
    assert [row["id"] for row in written] == list(range(60))
    assert [row["id"] for row in written if row["error"] is not None] == [17]
    assert all(row["generated_text"].strip() for row in written if row["error"] is None)
    assert all(1 <= row["num_generated_tokens"] <= 6 for row in written if row["error"] is None)
    assert sum(actor["tokens_generated"] for actor in summary["actors"]) == summary["generated_tokens"]
    assert all(actor["requests_finished"] > 0 for actor in summary["actors"])
