"""Saves of a run, and its learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cast_ray.errors import ConfigError
from cast_ray.training.muon import make_optimisers
from cast_ray.training.state import TrainingState, rate_factor


def _state(width: int = 4) -> TrainingState:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(width, 3), nn.LayerNorm(3))
    return TrainingState(network, make_optimisers(network, 0.01, 0.1), torch.ones(2), {"width": width})


def _step(state: TrainingState) -> None:
    state.network(torch.arange(8.0).view(2, 4)).square().sum().backward()
    for optimiser in state.optimisers:
        optimiser.step()
        optimiser.zero_grad()
    state.step += 1


def test_a_loaded_state_goes_on_as_the_saved_one_would(tmp_path: Path) -> None:
    first = _state()
    for _ in range(3):
        _step(first)
    first.history.append((3, 1.5, 0.5, 1.25))
    first.save(tmp_path)
    _step(first)
    second = _state()
    assert second.load(tmp_path)
    assert second.history == [(3, 1.5, 0.5, 1.25)]
    _step(second)
    assert second.step == first.step == 4
    for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_to_load_is_no_error(tmp_path: Path) -> None:
    assert not _state().load(tmp_path)


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    _state().save(tmp_path)
    with pytest.raises(ConfigError, match="width 4 there, 5 asked for"):
        _state(5).load(tmp_path)


def test_learning_rate_rises_stays_and_falls() -> None:
    rates = [rate_factor(step, 4, step / 100, 0.2) for step in range(101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(rate == 1.0 for rate in rates[4:80])
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == 0.0
