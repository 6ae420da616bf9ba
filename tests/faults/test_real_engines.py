"""Real engines are killed while they decode, and what comes out is what an undisturbed run gave, token by token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.pool.client import PoolClient
from cast_ray.pool.pool import EnginePool
from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams, derive_seed
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

ROWS = 40
pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_contents_after_kills_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "target", qwen3(), spread=2.0)
    drafter = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    engine = EngineConfig(
        target=str(target),
        drafter=str(drafter),
        width="fixed:7",
        dtype="float32",
        device="cpu",
        threads=1,
        max_batch_size=4,
        profile_dir=tmp_path / "profiles",
    )
    chance = random.Random(3)
    rows = [
        RowRequest(
            str(i),
            [chance.randrange(2, 12) for _ in range(chance.choice([2, 9, 30]))],
            SamplingParams(max_tokens=60, temperature=0.8 * (i % 2), seed=derive_seed(1, i) if i % 2 else None),
        )
        for i in range(ROWS)
    ]
    # Unlike batches on the two engines, so that what is compared was decoded in unlike company too.
    groups = [{"name": "a", "count": 1}, {"name": "b", "count": 1, "engine": {"max_batch_size": 2}}]
    with EnginePool(engine, PoolConfig(groups=groups)) as pool:
        client = PoolClient(pool.members)
        undisturbed = asyncio.run(asyncio.wait_for(client.generate(rows), 120))
        assert all(answer.error is None and answer.num_generated_tokens == 60 for answer in undisturbed)

        async def disturbed() -> list[str | None]:
            work = asyncio.ensure_future(client.generate(rows))
            await asyncio.sleep(chance.uniform(0.1, 0.6))
            assert not work.done(), "the fault came after the work"
            for about in (await asyncio.to_thread(pool.stats)).values():
                os.kill(about["pid"], signal.SIGKILL)
            return [answer.text for answer in await work]

        texts = asyncio.run(asyncio.wait_for(disturbed(), 200))
        assert [answer.text for answer in undisturbed] == texts
        assert all(about["restarted"] for about in pool.stats(timeout_s=60).values() if about["engine"])
