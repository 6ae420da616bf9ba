"""Engines of unlike speeds on real Ray: all of them work, a fast one more than a slow one, and none loads PyTorch.

By how much, and how near they come to the sum of their rates, is told without a clock in
tests/unit/pool/test_speeds.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.pool.client import PoolClient
from cast_ray.pool.pool import EnginePool
from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams
from tests.fake_engine import WaitingEngine

pytestmark = pytest.mark.usefixtures("ray_cluster")
ROWS = 120
# So far apart that no load of the machine turns them round.
SLOW, FAST = 1, 16


def test_rows_go_to_all_and_more_to_the_fast_and_the_processes_stay_light() -> None:
    groups = [{"name": f"speed-{speed}", "count": 2, "engine": {"threads": speed}} for speed in (SLOW, FAST)]
    rows = [RowRequest(str(i), "so many words that a row takes a while " * 6, SamplingParams()) for i in range(ROWS)]
    with EnginePool(EngineConfig(max_batch_size=2), PoolConfig(groups=groups), WaitingEngine) as pool:
        answers = asyncio.run(asyncio.wait_for(PoolClient(pool.members).generate(rows), 300))
        actors = pool.stats()
        answered = {name: about["rows"]["answered"] for name, about in actors.items()}
        for about in actors.values():
            assert "libtorch" not in Path(f"/proc/{about['pid']}/maps").read_text()
    assert all(answer.text for answer in answers)
    assert sum(answered.values()) == ROWS
    assert all(answered.values())
    slow, fast = ([answered[f"speed-{speed}-{number}"] for number in range(2)] for speed in (SLOW, FAST))
    assert min(fast) > max(slow)
