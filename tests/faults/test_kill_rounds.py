"""Ten rounds of SIGKILL at random moments: an engine, all engines, the driver, a node. Afterwards every id is there
once, with the contents of an undisturbed run.

The whole job runs each time, in a process of its own, on a cluster of two nodes. Most rounds have engines that wait
instead of computing; the last ones have a model.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from tests.fake_engine import FakeEngine
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("engine", "all engines", "driver", "node")
COLUMNS = ("generated_text", "finish_reason", "num_generated_tokens", "error")
# Two engines, of which one lives on the node that may go.
GROUPS = [
    {"name": "stays", "resources": {"stays": 1}, "count": 1},
    {"name": "goes", "resources": {"goes": 1}, "min": 0, "max": 1},
]

SCRIPT = """
import asyncio, os, sys
from pathlib import Path
import ray
from rich.console import Console
from cast_ray.batch import writer
from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.pool.actor import default_engine
from tests import fake_engine

# Parts of eight rows, so that there is something to lose and something to keep at every kill.
writer.PART_ROWS = 8
folder, fake = Path(sys.argv[2]), sys.argv[3] == "fake"
ray.cloudpickle.register_pickle_by_value(fake_engine)

class Slow(fake_engine.FakeEngine):
    async def _work(self, tokens):
        await asyncio.sleep(0.1)

def noted(config):
    (folder / str(os.getpid())).touch()  # a process that may be killed
    return Slow(config) if fake else default_engine(config)

run_job(JobConfig.model_validate_json(sys.argv[1]), noted, Console(quiet=True))
"""


class Nodes:
    """A head that stays and a node that goes, each in processes of its own on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"stays": 1}})
        self.address = self._cluster.address
        self.add()

    def add(self) -> None:
        self._second = self._cluster.add_node(num_cpus=2, resources={"goes": 1})

    def replace(self) -> None:
        """The second node dies at once, and another one comes."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self.add()

    def end(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        found = Nodes()
        yield found
        found.end()


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(output.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]


def contents(output: Path) -> dict[int, tuple[Any, ...]]:
    rows = rows_of(output)
    found = {row["id"]: tuple(row[column] for column in COLUMNS) for row in rows}
    assert len(found) == len(rows)
    return found


def engines(pids: Path) -> list[int]:
    """Those engines' processes that live; Ray names its workers so."""
    return [int(file.name) for file in pids.iterdir() if _command(file.name).startswith("ray::")]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def disturbed(config: JobConfig, fake: bool, pids: Path, nodes: Nodes, kind: str, chance: random.Random) -> None:
    """Run the job, kill one thing at a random moment between the first and the last row, and let it end; where it was
    the driver, start it again."""
    pids.mkdir()
    output = Path(str(config.output))
    # With the token of this process, with which the nodes were started.
    environment = {**os.environ, "RAY_ADDRESS": nodes.address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, config.model_dump_json(), str(pids), "fake" if fake else "real"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    def kill_engines(most: int) -> None:
        for pid in chance.sample(living := engines(pids), min(most, len(living))):
            os.kill(pid, signal.SIGKILL)

    def ended_early() -> str:
        return f"ended with {driver.returncode} before the fault: {driver.communicate()[1][-3000:]}"

    driver = start()
    deadline = time.monotonic() + 300
    while driver.poll() is None and not list(output.glob("part-*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1.5))
    assert driver.poll() is None, ended_early()
    acts: dict[str, Callable[[], None]] = {
        "engine": lambda: kill_engines(1),
        "all engines": lambda: kill_engines(99),
        "driver": driver.kill,
        "node": nodes.replace,
    }
    acts[kind]()
    _, errors = driver.communicate(timeout=300)
    if kind == "driver":
        assert driver.returncode == -signal.SIGKILL
        assert len(rows_of(output)) < len(rows_of(Path(str(config.output)).parent / "calm"))
        driver = start()
        _, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, f"{kind}: {errors[-3000:]}"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_eight_rounds_of_kills_leave_every_id_once(tmp_path: Path, nodes: Nodes) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"id": {index}, "prompt": "row {index} of many"}}\n' for index in range(800)))
    settings: dict[str, Any] = {
        "input": str(source), "batch_size": 8, "engine": {"max_batch_size": 8}, "pool": {"groups": GROUPS},
    }  # fmt: skip
    calm = {**settings, "pool": {"replicas": 1}, "output": str(tmp_path / "calm")}
    run_job(JobConfig(**calm), FakeEngine, Console(quiet=True))
    expected = contents(tmp_path / "calm")
    assert len(expected) == 800
    chance = random.Random(11)
    for number in range(8):
        config = JobConfig(output=str(tmp_path / f"round-{number}"), **settings)
        disturbed(config, True, tmp_path / f"pids-{number}", nodes, KINDS[number % 4], chance)
        assert contents(tmp_path / f"round-{number}") == expected, KINDS[number % 4]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_rounds_with_a_model_end_with_what_an_undisturbed_run_gives(tmp_path: Path, nodes: Nodes) -> None:
    target = save_tiny_model(tmp_path / "target", qwen3(), spread=4.0)
    drafter = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(f'{{"id": {index}, "prompt": "t{index % 50 + 3} t{index % 7 + 3}"}}\n' for index in range(300))
    )
    settings: dict[str, Any] = {
        "input": str(source),
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 3,
        "batch_size": 4,
        "engine": {
            "target": str(target),
            "drafter": str(drafter),
            "dtype": "float32",
            "width": "fixed:7",
            "max_batch_size": 4,
            "profile_dir": str(tmp_path / "profiles"),
            "probe_seconds": 1.0,
        },
    }
    run_job(JobConfig(output=str(tmp_path / "calm"), **settings), console=Console(quiet=True))
    expected = contents(tmp_path / "calm")
    assert len(expected) == 300
    assert {error for *_, error in expected.values()} == {None}
    chance = random.Random(12)
    for number, kind in enumerate(("driver", "node")):
        config = JobConfig(output=str(tmp_path / f"round-{number}"), pool={"groups": GROUPS}, **settings)
        disturbed(config, False, tmp_path / f"pids-{number}", nodes, kind, chance)
        assert contents(tmp_path / f"round-{number}") == expected, kind
