"""What engine actors tell Prometheus, read where Prometheus reads it: Ray's own port of the node."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request

import pytest

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.pool.client import PoolClient
from cast_ray.pool.pool import EnginePool
from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams
from tests.fake_engine import WaitingEngine

pytestmark = pytest.mark.usefixtures("ray_cluster")
GROUP = "measured"


def scrape(wanted: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The series of our group by name, once one named `wanted` is among them."""
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for _ in range(60):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        for name, tags, value in re.findall(r"^(ray_cast_ray_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            labels = dict(re.findall(r'(\w+)="(.*?)"', tags))
            if labels["group"] == GROUP:
                found.setdefault(name, []).append((labels, float(value)))
        if wanted in found:
            return found
        found = {}
        time.sleep(1)
    raise AssertionError(f"{wanted} was not exported")


def test_rows_tokens_and_rounds_are_exported_with_group_and_actor() -> None:
    config = PoolConfig(groups=[{"name": GROUP, "count": 1, "engine": {"threads": 50}}])
    rows = [RowRequest(str(i), "reject" if i == 3 else f"row {i} now", SamplingParams()) for i in range(40)]
    with EnginePool(EngineConfig(max_batch_size=4), config, WaitingEngine) as pool:
        asyncio.run(asyncio.wait_for(PoolClient(pool.members).generate(rows), 120))
        pool.stats()
        series = scrape("ray_cast_ray_rounds_total")
    outcomes = {labels["outcome"]: value for labels, value in series["ray_cast_ray_rows_total"]}
    assert outcomes == {"ok": 39, "RequestError": 1}
    ((labels, tokens),) = series["ray_cast_ray_generation_tokens_total"]
    assert labels["actor"] == f"{GROUP}-0"
    assert tokens == 3 * 39
    assert series["ray_cast_ray_e2e_request_latency_seconds_count"][0][1] == 40
    assert series["ray_cast_ray_time_to_first_token_seconds_count"][0][1] == 39
    assert series["ray_cast_ray_round_length_count"][0][1] == 39
