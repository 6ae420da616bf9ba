"""`ray job submit --working-dir . -- python jobs/batch_generate.py …` on a cluster of two nodes made by `ray start`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support import qwen3, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
ROWS = 40


def free_ports(count: int) -> list[int]:
    """Ports that are free now and lie above those that Ray gives to its workers (10002 to 19999)."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in range(21000 + os.getpid() % 5000, 32000):
            held = stack.enter_context(socket.socket())
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


@contextmanager
def node(environment: dict[str, str], port: int, *arguments: str) -> Iterator[None]:
    """One node, in the foreground of a process that is ended again with all that it started. Yields when it listens on
    `port`; one that gives up before, as Ray does on a machine that is very busy, is started again."""
    for _ in range(3):
        process = subprocess.Popen(
            [RAY, "start", "--block", *arguments],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if listens(port, process):
                yield
                return
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"no node listens on port {port}")


def listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Whether the port is open, before the process ends or two minutes are over."""
    for _ in range(240):
        if process.poll() is not None:
            return False
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.5)
    return False


@pytest.mark.slow
def test_a_job_is_submitted_to_two_nodes_and_uses_both(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "target", qwen3())
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"t{i % 12} t3"}) + "\n" for i in range(ROWS)))
    settings = {
        "engine": {"target": str(target), "drafter": "none", "width": "ar", "dtype": "float32", "max_batch_size": 4},
        "pool": {
            "startup_timeout_s": 300,
            "groups": [
                {"name": "here", "resources": {"here": 1}, "count": 1},
                {"name": "there", "resources": {"there": 1}, "min": 1, "max": 1},
            ],
        },
        "max_tokens": 8,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    gcs, dashboard, agent, other_agent, client = free_ports(5)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CAST_RAY_"))}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        # The job runs with the interpreter that Ray finds first.
        "PATH": f"{Path(sys.executable).parent}:{environment.get('PATH', '')}",
    }
    temporary = Path("/tmp") / f"cast-ray-{os.getpid()}"  # sockets' paths must be short
    head = (
        "--head",
        f"--port={gcs}",
        "--num-cpus=2",
        '--resources={"here": 1}',
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={client}",
        f"--temp-dir={temporary}",
    )
    worker = (
        f"--address=127.0.0.1:{gcs}",
        "--num-cpus=2",
        '--resources={"there": 1}',
        f"--dashboard-agent-listen-port={other_agent}",
        # Its own, as on another machine: both would unpack the job's files into one folder, one under the other's eyes.
        f"--temp-dir={temporary}-2",
    )
    submit = [
        RAY, "job", "submit", "--address", f"http://127.0.0.1:{dashboard}", "--working-dir", str(ROOT), "--",
        "python", "jobs/batch_generate.py", "--config", str(tmp_path / "job.yaml"),
        "--input", str(source), "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    with node(environment, agent, *head), node(environment, other_agent, *worker):
        done = subprocess.run(
            submit, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
        )
    for folder in (temporary, Path(f"{temporary}-2")):
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = [row for file in (tmp_path / "out").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    assert {row["error"] for row in rows} == {None}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [actor["name"] for actor in summary["actors"]] == ["here-0", "there-0"]
    assert len({actor["node"] for actor in summary["actors"]}) == 2
    assert all(actor["requests_finished"] > 0 for actor in summary["actors"])
    assert "tokens/s" in done.stdout
