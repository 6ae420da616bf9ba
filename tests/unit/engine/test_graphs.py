"""An engine whose forwards are replayed says what one without says, token by token, and how often it replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cast_ray import Engine, EngineConfig, SamplingParams
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PROMPTS = [[1], [(7 * i) % 12 for i in range(45)], [3, 4, 5], [2] * 20, [9, 8, 7, 6], [5, 5, 1]]


def outputs(folder: Path, **changes: Any) -> tuple[list[list[int]], Engine]:
    settings: dict[str, Any] = {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_batch_size": 3,
        "max_step_tokens": 24,
        "max_nodes": 12,
        "max_context": 200,
        "graph_seconds": 2.0,
        "probe_seconds": 2.0,
        "profile_dir": folder / "profiles",
    }
    engine = Engine(EngineConfig(**{**settings, **changes}))
    params = [
        SamplingParams(max_tokens=30, temperature=0.9 * (i % 2), seed=i, repetition_penalty=1.0 + 0.2 * (i == 3))
        for i in range(len(PROMPTS))
    ]
    return [out.token_ids for out in engine.generate(PROMPTS, params)], engine


@pytest.mark.parametrize("width", ["ar", "chain", "fixed:12", "joint"])
def test_replayed_rounds_give_the_same_tokens(tmp_path: Path, width: str) -> None:
    save_tiny_model(tmp_path / "target", qwen3(), spread=2.0)
    save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    expected, plain = outputs(tmp_path, width="ar")
    assert plain._parts.target.graphs is None
    found, engine = outputs(tmp_path, width=width, graphs="on")
    assert found == expected
    graphs = engine._parts.target.graphs
    assert graphs is not None
    report = graphs.report()
    assert report["off"] is None
    assert report["replays"] > 20
    engine.check_integrity()
    if width == "fixed:12":
        drafter: Any = engine._parts.drafter
        assert drafter.graphs.report()["replays"] > 5
        assert drafter.graphs.report()["off"] is None
    if width == "joint":
        assert engine._parts.latency is not None
        assert engine._parts.latency.buckets == graphs.buckets
