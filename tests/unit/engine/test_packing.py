"""Captured packing gives the trees of plain packing, replay after replay."""

from __future__ import annotations

import pytest
import torch

from cast_ray.engine.packing import Packing
from cast_ray.trees.pack import DraftScores

CPU = torch.device("cpu")


@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.parametrize("paired", [True, False])
@torch.inference_mode()
def test_replayed_trees_are_those_of_plain_packing(branching: bool, paired: bool) -> None:
    torch.manual_seed(0)
    plain = Packing(CPU, nodes=20, branching=branching, captured=False)
    captured = Packing(CPU, nodes=20, branching=branching, captured=True)
    for batch in (1, 3, 1, 3, 3, 2):
        logprobs = torch.randn(batch, 5, 6).log_softmax(-1)
        # Some tokens may not be emitted, now and then all of a depth.
        logprobs[torch.rand(batch, 5, 6) < 0.2] = float("-inf")
        logprobs[0, 3] = float("-inf")
        pairwise = torch.randn(batch, 4, 6, 6) if paired else None
        scores = DraftScores(logprobs, torch.randint(99, (batch, 5, 6)), pairwise)
        expected, found = plain(scores), captured(scores)
        for name in ("tokens", "parents", "depths", "masses", "counts"):
            assert getattr(found, name).equal(getattr(expected, name)), name
        assert found.max_depth == expected.max_depth
    assert captured._recordings.report()["recorded"] == 3
    assert captured._recordings.report()["replays"] == 6
