"""`cast-ray serve` as a person has it: what it says while it starts, and how it ends when it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from tests.serving import LONG, PATIENCE_S, SHAPE, wait_for
from tests.support import save_tiny_drafter, save_tiny_model


@contextmanager
def command(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    """The command in a process group of its own, as a shell starts it; what it prints; and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = folder / "printed"
    # No terminal, and none of the cluster that other tests may have.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CAST_RAY_"))}
    line = [sys.executable, "-m", "cast_ray.cli", "serve", "--port", str(port), "--dtype", "float32", *options]
    with printed.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield process, printed, port
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C in a terminal: everything that the command started gets it too."""
    os.killpg(process.pid, signal.SIGINT)


def test_an_interrupted_server_finishes_what_is_aboard_and_ends_with_0_and_a_plain_line(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "target", SHAPE)
    drafter = save_tiny_drafter(tmp_path / "drafter", target=SHAPE)
    with command(
        tmp_path, "--target", str(target), "--drafter", str(drafter), "--width", "fixed:4", "--model", "tiny"
    ) as (process, printed, port):
        wait_for(lambda: "\n  try " in printed.read_text() or process.poll() is not None)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE_S)
        stream = client.completions.create(model="tiny", prompt="t3 t4", stream=True, **LONG)
        next(stream)
        interrupt(process)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert process.wait(PATIENCE_S) == 0
    said = printed.read_text()
    assert reasons[-1] == "length"
    assert f"loading {target}" in said
    ready = said[said.index("ready\n") :]
    for name, value in {
        "API": f"http://127.0.0.1:{port}/v1",
        "model": "tiny",
        "drafter": drafter,
        "width": "fixed:4, at most 4 candidates",
        "replicas": "1 on ",
        "keys": "none needed",
        "try": f"curl http://127.0.0.1:{port}/v1/chat/completions",
    }.items():
        assert f"\n  {name:<9} {value}" in ready
    # Of its end one line before and one behind, and nothing of Ray's.
    assert ready.splitlines()[-2].startswith("stopping: ")
    assert ready.splitlines()[-1] == "stopped"
    assert "Traceback" not in said
    assert "graceful_shutdown" not in said


def test_a_target_that_is_not_there_is_said_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with command(tmp_path, "--target", absent) as (process, printed, _):
        assert process.wait(PATIENCE_S) == 2
    said = printed.read_text()
    assert said.splitlines()[-1].startswith(f"error: target={absent!r}: no such file or folder. Check the path")
    assert said.count("loading") == 1
