"""A driver that is killed at any moment: the same command does what is left, and every row is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("ray_cluster")

# Parts of eight rows, so that there is something to lose and something to keep at every kill.
SCRIPT = """
import sys, ray
from rich.console import Console
from cast_ray.batch import writer
from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.pool.actor import default_engine
from tests import fake_engine

writer.PART_ROWS = 8

class Noting(fake_engine.FakeEngine):
    async def _work(self, tokens):
        import asyncio
        await asyncio.sleep(0.05)

    async def generate(self, prompt, params, request_id=None):
        answer = await super().generate(prompt, params, request_id)
        with open(log_path, "a") as log:
            log.write(prompt + "\\n")
        return answer

factory = default_engine
if len(sys.argv) > 2:
    log_path = sys.argv[2]
    ray.cloudpickle.register_pickle_by_value(fake_engine)
    factory = Noting
run_job(JobConfig.model_validate_json(sys.argv[1]), factory, Console(quiet=True))
"""


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(output.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]


def finish_with_kills(config: JobConfig, kills: int, seed: int, *arguments: str, on_kill: Any = lambda: None) -> int:
    """Run the job in a process of its own again and again, killing it soon after it has written something; at last let
    it end. Returns how many were killed."""
    import ray

    random_moment = random.Random(seed)
    output = Path(str(config.output))
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    for attempt in range(kills + 1):
        command = [sys.executable, "-c", SCRIPT, config.model_dump_json(), *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        before = len(list(output.glob("part-*")))
        deadline = time.monotonic() + 300
        while attempt < kills and process.poll() is None and len(list(output.glob("part-*"))) == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if attempt < kills:
            time.sleep(random_moment.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
        if process.returncode == 0:
            return attempt
        assert process.returncode == -signal.SIGKILL, errors
        on_kill()
    raise AssertionError("the last run did not end by itself")


def test_killed_drivers_leave_every_row_once_and_do_nothing_twice(tmp_path: Path) -> None:
    source, output, log = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "log"
    source.write_text("".join(f'{{"id": {index}, "prompt": "row {index}"}}\n' for index in range(400)))
    config = JobConfig(input=str(source), output=str(output), batch_size=4, engine={"max_batch_size": 8})
    wanted = {index: f"ROW {index}" for index in range(400)}
    kept: list[tuple[set[str], int]] = []

    def note() -> None:
        time.sleep(0.5)  # engines whose driver was killed live on for moments
        done = {row["prompt"] for row in rows_of(output)}
        kept.append((done, len(log.read_text().splitlines())))

    killed = finish_with_kills(config, 2, 1, str(log), on_kill=note)

    assert killed >= 1
    rows = rows_of(output)
    assert len(rows) == 400
    assert {row["id"]: row["generated_text"] for row in rows} == wanted
    lines = log.read_text().splitlines()
    for done, position in kept:
        assert done
        assert not done.intersection(lines[position:])
    assert not [file for file in output.iterdir() if file.name.endswith(".partial")]


def test_a_killed_job_of_a_real_engine_ends_with_what_an_undisturbed_one_gives(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "model", qwen3(), spread=4.0)
    drafter = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(f'{{"id": "r{index}", "prompt": "t{index % 50 + 3} t{index % 7 + 3}"}}\n' for index in range(150))
    )
    settings: dict[str, Any] = {
        "input": str(source),
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 3,
        "batch_size": 4,
        "engine": {
            "target": str(target),
            "drafter": str(drafter),
            "dtype": "float32",
            "width": "joint",
            # A random drafter is to go on drafting.
            "watch_drafter": False,
            "max_batch_size": 4,
            "profile_dir": str(tmp_path / "profiles"),
            "probe_seconds": 1.0,
        },
    }
    summary = run_job(JobConfig(output=str(tmp_path / "calm"), **settings), console=Console(quiet=True))
    told = summary["actors"][0]["width"]["reliability"]
    assert sum(entry["nodes"] for entry in told["by_depth"]) > 0
    page = (tmp_path / "calm" / "report.html").read_text()
    assert "<h3>Acceptance by depth</h3>" in page
    assert "<h3>Predicted and achieved round length</h3>" in page

    killed = finish_with_kills(JobConfig(output=str(tmp_path / "killed"), **settings), 1, 2)

    assert killed == 1
    columns = ("generated_text", "finish_reason", "num_generated_tokens", "error")
    calm, rough = (
        {row["id"]: tuple(row[column] for column in columns) for row in rows_of(tmp_path / name)}
        for name in ("calm", "killed")
    )
    assert len(rows_of(tmp_path / "killed")) == 150
    assert calm == rough
    assert {error for *_, error in calm.values()} == {None}
    assert len({text for text, *_ in calm.values()}) > 100


def test_an_interrupted_job_says_so_in_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    import ray

    target = save_tiny_model(tmp_path / "model", qwen3(), spread=4.0)
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(f'{{"id": {index}, "prompt": "t{index % 50 + 3} t4"}}\n' for index in range(3000)))
    command = [
        sys.executable, str(ROOT / "jobs" / "batch_generate.py"), "--input", str(source), "--output", str(output),
        "--target", str(target), "--drafter", "none", "--width", "ar", "--dtype", "float32", "--max-tokens", "100",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while process.poll() is None and not list(output.glob("part-*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 130, shown[-3000:]
    assert "stopped. What is answered is kept" in shown.splitlines()[-1]
    assert "Traceback" not in shown
    ids = [row["id"] for row in rows_of(output)]
    assert 0 < len(set(ids)) == len(ids) < 3000
    assert not (output / "summary.json").exists()
