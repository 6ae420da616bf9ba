"""Engines that die, hang or never start, on real Ray: every row is answered once, and only the guilty row has an error.

The engines wait instead of computing, so that what is tested is what happens around them; `test_real_engines.py` has
real ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import EngineError
from cast_ray.pool.client import PoolClient
from cast_ray.pool.pool import EnginePool
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import SamplingParams
from tests.fake_engine import WaitingEngine

ROOT = Path(__file__).resolve().parents[2]
ROWS = 400
pytestmark = pytest.mark.usefixtures("ray_cluster")


def rows(special: dict[int, str] | None = None, count: int = ROWS) -> list[RowRequest]:
    special = special or {}
    return [RowRequest(str(i), special.get(i, f"row number {i} of many"), SamplingParams()) for i in range(count)]


def expected(count: int = ROWS) -> list[str]:
    return [f"ROW NUMBER {i} OF MANY" for i in range(count)]


@contextmanager
def engines(count: int = 2, **pool: object) -> Iterator[tuple[EnginePool, PoolClient]]:
    config = PoolConfig(groups=[{"name": "wait", "count": count, "engine": {"threads": 2}}], **pool)
    with EnginePool(EngineConfig(max_batch_size=4), config, WaitingEngine) as pool_of_engines:
        yield pool_of_engines, PoolClient(pool_of_engines.members)


def answer(client: PoolClient, work: list[RowRequest], *, after: float = 0.0, act: object = None) -> list[RowAnswer]:
    """The answers; `act` is called `after` seconds into the work."""

    async def both() -> list[RowAnswer]:
        answers = asyncio.ensure_future(client.generate(work))
        if callable(act):
            await asyncio.sleep(after)
            assert not answers.done(), "the fault came after the work"
            await asyncio.to_thread(act)
        return await answers

    return asyncio.run(asyncio.wait_for(both(), timeout=120))


def pids(pool: EnginePool) -> list[int]:
    return [about["pid"] for about in pool.stats().values() if about["engine"]]


def test_engines_killed_at_random_times_one_or_all_lose_no_row() -> None:
    chance = random.Random(7)
    with engines() as (pool, client):
        # All engines alive at the start of each go, so that every go kills some.
        for victims in (1, 2):

            def kill(victims: int = victims) -> None:
                for pid in chance.sample(pids(pool), victims):
                    os.kill(pid, signal.SIGKILL)

            answers = answer(client, rows(), after=chance.uniform(0.1, 1.0), act=kill)
            assert [found.text for found in answers] == expected()
            deadline = time.monotonic() + 60
            while len(pids(pool)) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
        assert sum(bool(about["restarted"]) for about in pool.stats().values()) == 2


def test_a_process_that_stands_still_is_ended_and_its_rows_go_to_others() -> None:
    with engines(hang_timeout_s=2.0) as (pool, client):
        before = pids(pool)
        answers = answer(client, rows(), after=0.3, act=lambda: os.kill(before[0], signal.SIGSTOP))
        assert [found.text for found in answers] == expected()
        assert not Path(f"/proc/{before[0]}").exists()


def test_rows_that_hang_or_kill_their_engine_again_and_again_are_given_up_and_no_other() -> None:
    with engines(hang_timeout_s=4.0, row_attempts=2) as (_, client):
        answers = answer(client, rows({5: "poison", 40: "please hang"}, count=60))
    wrong = {index: found.error for index, found in enumerate(answers) if found.error is not None}
    assert sorted(wrong) == [5, 40]
    assert all(str(error).startswith("EngineDied: 2 engines died while they held this row") for error in wrong.values())
    assert "the last: made no progress for 4 s with 1 rows aboard (hang)" in str(wrong[40])
    assert [found.text for found in answers if found.error is None] == [
        text for index, text in enumerate(expected(60)) if index not in wrong
    ]


def test_engines_that_do_not_start_are_named_and_left_out() -> None:
    groups = [
        {"name": "good", "count": 1},
        {"name": "bad", "count": 1, "engine": {"drafter": "missing"}},
        {"name": "later", "min": 0, "max": 2, "resources": {"nowhere": 1}},
    ]
    with EnginePool(EngineConfig(max_batch_size=4), PoolConfig(groups=groups), WaitingEngine) as pool:
        assert list(pool.failed) == ["bad-0"]
        assert "drafter='missing': does not exist" in pool.failed["bad-0"]
        answers = answer(PoolClient(pool.members), rows(count=20))
        assert [found.text for found in answers] == expected(20)
        states = {name: about.get("state", "ready") for name, about in pool.stats().items()}
        assert states == {"good-0": "ready", "bad-0": "lost", "later-0": "starting", "later-1": "starting"}
        began = time.monotonic()
    # Those that wait for room are not waited for at the end.
    assert time.monotonic() - began < 5


def test_a_job_whose_engines_all_lack_room_says_so() -> None:
    groups = [{"name": "later", "min": 1, "max": 2, "resources": {"nowhere": 1}}]
    with pytest.raises(EngineError, match="no engine actor was ready within 2 s"):
        EnginePool(EngineConfig(), PoolConfig(groups=groups, startup_timeout_s=2), WaitingEngine)


NODE_DIES = """
import asyncio, logging, os, sys
os.environ["RAY_worker_niceness"] = "0"
import ray
from ray.cluster_utils import Cluster
from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.pool.client import PoolClient
from cast_ray.pool.pool import EnginePool
from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams
from tests import fake_engine

ray.cloudpickle.register_pickle_by_value(fake_engine)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"stays": 1}})
second = cluster.add_node(num_cpus=2, resources={"goes": 2})
ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
groups = [
    {"name": "stays", "resources": {"stays": 1}, "count": 1},
    {"name": "goes", "resources": {"goes": 1}, "min": 2, "max": 3},
]
rows = [RowRequest(str(i), f"row number {i} of many", SamplingParams()) for i in range(600)]

async def main(pool):
    client = PoolClient(pool.members)
    work = asyncio.ensure_future(client.generate(rows))
    await asyncio.sleep(0.7)
    assert not work.done()
    cluster.remove_node(second, allow_graceful=False)
    answers = await work
    assert [found.text for found in answers] == [f"ROW NUMBER {i} OF MANY" for i in range(600)]
    # A new node: those that died with the old one and the one that never had room all come.
    cluster.add_node(num_cpus=2, resources={"goes": 3})
    for _ in range(240):
        alive = [name for name, about in pool.stats().items() if about["engine"]]
        if len(alive) == 4:
            break
        await asyncio.sleep(0.25)
    assert sorted(alive) == ["goes-0", "goes-1", "goes-2", "stays-0"], alive
    answers = await client.generate(rows)
    assert [found.text for found in answers] == [f"ROW NUMBER {i} OF MANY" for i in range(600)]
    assert all(about["rows"]["answered"] > 0 for about in pool.stats().values())

engine, config = EngineConfig(max_batch_size=4, threads=2), PoolConfig(groups=groups)
with EnginePool(engine, config, fake_engine.WaitingEngine) as pool:
    asyncio.run(asyncio.wait_for(main(pool), 200))
ray.shutdown()
cluster.shutdown()
print("every row answered")
"""


def test_a_node_that_is_lost_costs_no_row_and_a_new_one_brings_its_engines_back() -> None:
    """In a process of its own: a process can be in one cluster only."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", NODE_DIES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "every row answered" in done.stdout
