"""How often a round makes the host wait for the device, counted on CPU tensors: what a GPU would stand still for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.models.graph_safety import Watch
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from cast_ray.width.policy import make_policy
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "target", qwen3(), spread=2.0)
    save_tiny_drafter(folder / "drafter", target=qwen3())
    return folder


# Wide forwards for nothing and drafts for little: `joint` drafts in every round.
FLAT = LatencyTable([LatencyPoint(1, 1, 64, 10.0), LatencyPoint(60, 1, 64, 10.1)], [DraftPoint(1, 64, 0.01)], 0.1)


@pytest.mark.parametrize("width", ["ar", "chain", "fixed:12", "joint"])
def test_a_greedy_round_waits_for_what_it_must_know_and_no_more(folder: Path, width: str) -> None:
    # Captured forwards: attention without them looks at page numbers, as it may where it runs on a CPU.
    config = EngineConfig(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        width="fixed:12",
        dtype="float32",
        device="cpu",
        max_batch_size=4,
        max_nodes=12,
        max_context=400,
        graphs="on",
        graph_seconds=0.0,
    )
    engine = Engine(config)
    engine.use_policy(make_policy(width, block_size=5, max_nodes=12, latency=FLAT), health=engine.health)
    for number in range(3):
        engine.submit(f"r{number}", [1 + number, 2, 3] * (3 + number), SamplingParams(max_tokens=200))
    for _ in range(3):  # until all three decode
        engine.step()
    drafted = set()
    for _ in range(10):
        before = engine.totals.nodes_verified
        with Watch() as watch:
            engine.step()
        drafted.add(engine.totals.nodes_verified > before)
        # What was emitted; and where candidates are verified, their widths or the masses that those are chosen by.
        waits = 2 if engine.totals.nodes_verified > before else 1
        assert sum(watch.reads.values()) == waits, watch.reads
        assert not watch.uploads, watch.uploads
    assert (True in drafted) == (width != "ar")
