"""What the estimate of R(N) promises: the truth, from rounds at any width, whatever the drafter believes of itself."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.gain import RoundLengthEstimate
from cast_ray.width.host import accepted_nodes
from tests.unit.width.simulated_rounds import World, true_round_lengths, verify

NODES = 30


def learn(estimate: RoundLengthEstimate, tree: CandidateTree, widths: Tensor, accepted: Accepted) -> None:
    estimate.observe(tree.masses.double().numpy(), widths.numpy(), accepted_nodes(accepted, tree.max_nodes))


def run(world: World, width: int, rounds: int, batch: int = 500) -> RoundLengthEstimate:
    estimate = RoundLengthEstimate()
    for _ in range(rounds // batch):
        tree, _, target = world.round(batch)
        widths = tree.counts.clamp(max=width)
        accepted = verify(tree, target, widths)
        learn(estimate, tree, widths, accepted)
    return estimate


@pytest.mark.parametrize("sharpness", [1.0, 2.0, 0.6])
def test_the_estimate_finds_the_truth_at_every_verified_width(sharpness: float) -> None:
    truth = true_round_lengths(sharpness=sharpness, nodes=NODES)
    estimate = run(World(2, sharpness, NODES), NODES, 20_000)
    np.testing.assert_allclose(estimate.mean(NODES), truth, rtol=0.02)
    assert estimate.achieved() == pytest.approx(truth[-1], rel=0.02)


def test_an_over_confident_drafter_is_found_out() -> None:
    world = World(3, 2.0, NODES)
    truth = true_round_lengths(sharpness=2.0, nodes=NODES)
    estimate = run(world, NODES, 5_000)
    assert estimate.predicted() > 1.1 * truth[-1]
    assert estimate.reliability == pytest.approx((truth[-1] - 1) / (estimate.predicted() - 1), rel=0.05)
    assert estimate.reliability < 0.9


def test_what_was_verified_narrowly_speaks_for_wider_trees() -> None:
    truth = true_round_lengths(sharpness=1.0, nodes=NODES)
    estimate = run(World(4, 1.0, NODES), 8, 20_000)
    np.testing.assert_allclose(estimate.mean(NODES), truth, rtol=0.03)
    distrusted = run(World(4, 2.0, NODES), 8, 20_000).mean(NODES)
    believed = 1 + float(World(4, 2.0, NODES).round(20_000)[0].masses.mean(dim=0).sum())
    assert distrusted[-1] < 0.95 * believed


def test_rounds_of_unlike_widths_add_up_without_bias() -> None:
    world = World(5, 1.5, NODES)
    truth = true_round_lengths(sharpness=1.5, nodes=NODES)
    estimate = RoundLengthEstimate()
    for width in (NODES, 3, 11, 3) * 10:
        tree, _, target = world.round(500)
        widths = tree.counts.clamp(max=width)
        accepted = verify(tree, target, widths)
        learn(estimate, tree, widths, accepted)
    np.testing.assert_allclose(estimate.mean(NODES), truth, rtol=0.02)
    assert estimate.rounds == 20_000


def test_before_any_round_was_verified_the_masses_are_believed() -> None:
    estimate = RoundLengthEstimate()
    assert estimate.reliability == estimate.achieved() == estimate.predicted() == 1.0
    assert estimate.mean(3).tolist() == [1.0, 1.0, 1.0, 1.0]
    estimate.observe(np.array([[0.5, 0.25]]), np.array([0]), np.zeros((1, 2), dtype=bool))
    assert estimate.mean(3).tolist() == [1.0, 1.5, 1.75, 1.75]
    assert estimate.mean(1).tolist() == [1.0, 1.5]


def test_luck_at_one_rank_does_not_make_a_wide_tree_look_good() -> None:
    masses = np.full((1, 12), 0.02)
    masses[:, 0] = 0.5
    accepted = np.arange(12)[None] == 11
    estimate = RoundLengthEstimate()
    for _ in range(3):
        estimate.observe(masses, np.array([12]), accepted)
    gains = np.diff(estimate.mean(12))
    assert (np.diff(gains) <= 1e-12).all()
    assert gains[-1] < 0.1 < 1.0  # the raw share is 3 of 3


def test_round_lengths_are_concave_after_few_rounds() -> None:
    estimate = run(World(7, 2.0, NODES), NODES, 50, batch=10)
    assert (np.diff(np.diff(estimate.mean(NODES))) <= 1e-9).all()


def test_rounds_without_candidates_teach_nothing() -> None:
    estimate = RoundLengthEstimate()
    estimate.observe(np.zeros((4, 0)), np.zeros(4, dtype=np.int64), np.zeros((4, 0), dtype=bool))
    assert estimate.rounds == 0


def test_an_estimate_reports_plain_values() -> None:
    report = run(World(8, 1.0, NODES), 10, 500).to_dict()
    assert set(report) == {"rounds", "reliability", "predicted_round_length", "achieved_round_length"}
    assert all(type(value) in (int, float) for value in report.values())
