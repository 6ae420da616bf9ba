"""Whose candidates were accepted, and how that stands against what a drafter's record lets expect."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cast_ray.engine.tally import SOURCES, count_accepted, drafter_record
from cast_ray.trees.accept import Accepted
from cast_ray.width.reliability import DEPTHS, MASSES
from tests.unit.width.simulated_rounds import World, verify


@pytest.mark.parametrize(
    ("length", "kept", "gained"),
    [(4, 4, 3), (1, 1, 0), (4, 2, 1), (2, 1, 0), (3, 0, 0), (3, 5, 2)],
    ids=["whole", "nothing", "cut", "a choice of one token", "an end alone", "more than the round's own"],
)
def test_rounds_and_gained_tokens_add_up_to_what_is_kept(length: int, kept: int, gained: int) -> None:
    counts = count_accepted([1, 1, 1], length, kept)
    assert sum(counts) == gained
    assert counts[1] == gained
    assert len(counts) == len(SOURCES)


def test_the_record_expects_what_a_sound_drafter_gets_with_its_variance() -> None:
    """Of a drafter whose masses are true, with a record that says so."""
    world, parts = World(5, 1.0, 20), []
    for _ in range(10):
        tree, _, target = world.round(400)
        accepted = verify(tree, target, tree.counts)
        parts.append(drafter_record(tree, tree.counts, accepted, None, torch.ones(DEPTHS, MASSES)))
    rows = torch.cat(parts).double().numpy()
    assert rows.shape == (4000, 6)
    expected, variance, counted = rows[:, 3:].T
    np.testing.assert_array_equal(counted, rows[:, 1])
    assert abs(counted.sum() - expected.sum()) < 4 * np.sqrt(variance.sum())
    assert np.square(counted - expected).mean() == pytest.approx(variance.mean(), rel=0.1)


def test_requests_that_sample_are_not_held_against_a_greedy_record() -> None:
    tree, _, target = World(5, 1.0, 20).round(3)
    accepted: Accepted = verify(tree, target, tree.counts)
    recorded, temperatures = torch.full((DEPTHS, MASSES), 0.5), torch.tensor([0.0, 0.7, 0.0])
    rows = drafter_record(tree, tree.counts, accepted, temperatures, recorded)
    assert rows[1, 3:].tolist() == [0.0, 0.0, 0.0]
    assert (rows[[0, 2], 3] > 0).all()
    assert drafter_record(tree, tree.counts, accepted).shape == (3, 3)
