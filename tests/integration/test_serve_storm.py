"""Many clients at once on a live server, some rude, a replica killed among them: the benchmark's small sister."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# What it adds to `serve/test_load` is numbers: the kill, the rude clients and the full queues are there one by one.
@pytest.mark.slow
def test_a_storm_hangs_nothing_changes_nothing_and_leaves_nothing() -> None:
    numbers = ["--clients", "16", "--seconds", "20", "--prompts", "8", "--patience", "300"]
    command = [sys.executable, str(ROOT / "benchmarks" / "serve_stress.py"), *numbers]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert "all pages free" in ran.stdout
