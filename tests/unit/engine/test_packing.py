"""Captured packing gives the trees of plain packing, replay after replay."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from cast_ray.engine.packing import PACKING_BYTES, Packing
from cast_ray.models.recordings import Recordings
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


@torch.inference_mode()
def test_packing_that_has_taken_its_memory_goes_on_without_recordings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    taken = itertools.count(0, PACKING_BYTES // 4)  # looked at before and after a recording: a quarter each
    monkeypatch.setattr(Recordings, "_reserved", lambda self: next(taken))
    plain = Packing(CPU, nodes=20, branching=True, captured=False)
    captured = Packing(CPU, nodes=20, branching=True, captured=True)
    with caplog.at_level(logging.INFO):
        for batch in (1, 2, 3, 4, 5, 6, 1, 4, 6):
            scores = DraftScores(torch.randn(batch, 5, 6).log_softmax(-1), torch.randint(99, (batch, 5, 6)))
            assert captured(scores).tokens.equal(plain(scores).tokens)
    report = captured._recordings.report()
    assert (report["recorded"], report["bytes"]) == (4, PACKING_BYTES)
    # The batches of 1 and of 4 once more from their recordings, those of 5 and 6 as they come.
    assert (report["replays"], report["eager"]) == (6, 3)
    assert (
        caplog.text.count("packing: 4 recordings in 256 MiB are as many as are allowed; other sizes run eagerly") == 1
    )
