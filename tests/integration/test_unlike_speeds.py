"""Engines of speeds 1, 2 and 4 on real Ray share the rows by speed, in processes that never load PyTorch.

How near they come to the sum of their rates is told without a clock in tests/unit/pool/test_speeds.py.
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
ROWS = 420


def test_rows_are_shared_by_speed_and_the_processes_stay_light() -> None:
    groups = [{"name": f"speed-{speed}", "count": 2, "engine": {"threads": speed}} for speed in (1, 2, 4)]
    rows = [RowRequest(str(i), "so many words that a row takes a while " * 6, SamplingParams()) for i in range(ROWS)]
    with EnginePool(EngineConfig(max_batch_size=2), PoolConfig(groups=groups), WaitingEngine) as pool:
        asyncio.run(asyncio.wait_for(PoolClient(pool.members).generate(rows), 300))
        actors = pool.stats()
        shares = dict.fromkeys((1, 2, 4), 0.0)
        for name, about in actors.items():
            shares[int(name.split("-")[1])] += about["rows"]["answered"] / ROWS
            assert "libtorch" not in Path(f"/proc/{about['pid']}/maps").read_text()
    assert sum(shares.values()) == pytest.approx(1.0)
    for speed, share in shares.items():
        assert share == pytest.approx(speed / 7, rel=0.3)
