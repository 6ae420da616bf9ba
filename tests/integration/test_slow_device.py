"""A device that slows down while it decodes: widths follow, output does not change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cast_ray import Engine, EngineConfig, SamplingParams
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

FLAT_S, STEEP_S_A_ROW = 0.02, 0.006


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "target", qwen3())
    save_tiny_drafter(folder / "drafter", target=qwen3())
    return folder


def engine_for(pair: Path, width: str) -> Engine:
    return Engine(
        EngineConfig(
            target=str(pair / "target"),
            drafter=str(pair / "drafter"),
            width=width,
            dtype="float32",
            device="cpu",
            max_nodes=31,
            max_batch_size=2,
            probe_seconds=1.0,
            profile_dir=pair / "profiles",
            watch_drafter=False,
        )
    )


def test_widths_follow_a_device_that_gets_steep(pair: Path) -> None:
    """All twelve tokens of this target fit into one tree, so a wide one always gains a token: worth it where rows are
    free, and not where each takes as long as the first."""
    engine = engine_for(pair, "joint")
    target = engine._parts.target
    forward, rows, waits = target.forward, [], {"flat": lambda n: FLAT_S, "steep": lambda n: n * STEEP_S_A_ROW}
    device = "flat"

    def slowed(step: Any, logit_rows: Any) -> Any:
        rows.append(len(step.tokens))
        time.sleep(waits[device](len(step.tokens)))
        return forward(step, logit_rows)

    target.forward = slowed  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    outs, widths = [], {}
    for device in ("flat", "steep"):
        for _ in range(3):
            rows.clear()
            outs += engine.generate([[1, 2, 3]], params)
        # Of the last of the three, by when it has been learnt.
        widths[device] = sum(rows) / len(rows)
    assert widths["flat"] > 8
    assert widths["steep"] < widths["flat"] / 2
    (reference,) = engine_for(pair, "ar").generate([[1, 2, 3]], params)
    assert all(out.token_ids == reference.token_ids for out in outs)
