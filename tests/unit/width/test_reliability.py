"""What reliability promises: expected masses that hold, families that fit their parents, classes that do not mix."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.host import HostTree, accepted_nodes, read_tree
from cast_ray.width.reliability import Reliability
from tests.unit.width.simulated_rounds import World, verify

NODES = 30


def learn(reliability: Reliability, read: HostTree, widths: np.ndarray, accepted: np.ndarray) -> None:
    reliability.observe(read, reliability.calibrate(read), widths, accepted)


def teach(reliability: Reliability, world: World, rounds: int, batch: int = 200, temperature: float = 0.0) -> None:
    warm = torch.full((batch,), temperature) if temperature else None
    for _ in range(rounds):
        tree, _, target = world.round(batch)
        accepted = verify(tree, target, tree.counts)
        read = read_tree(tree, warm)
        learn(reliability, read, tree.counts.numpy(), accepted_nodes(accepted, NODES))


def truth_and_belief(reliability: Reliability, sharpness: float, temperature: float = 0.0) -> tuple[np.ndarray, ...]:
    tree, true_mass, _ = World(99, sharpness, NODES).round(4000)
    read = read_tree(tree, torch.full((4000,), temperature) if temperature else None)
    return true_mass.numpy().astype(np.float64), reliability.calibrate(read), read.masses


@pytest.mark.parametrize("sharpness", [0.6, 1.0, 2.0])
def test_expected_masses_hold_by_depth_and_by_mass(sharpness: float) -> None:
    reliability = Reliability()
    teach(reliability, World(1, sharpness, NODES), 40)
    truth, expected, raw = truth_and_belief(reliability, sharpness)
    np.testing.assert_allclose(expected.sum(axis=1).mean(), truth.sum(axis=1).mean(), rtol=0.04)
    tree, _, _ = World(99, sharpness, NODES).round(4000)
    for depth in range(1, 5):
        here = tree.depths.numpy() == depth
        assert expected[here].sum() == pytest.approx(truth[here].sum(), rel=0.12)
    for low, high in ((0.02, 0.1), (0.1, 0.4), (0.4, 1.0)):
        here = (raw > low) & (raw <= high)
        assert expected[here].sum() == pytest.approx(truth[here].sum(), rel=0.1)


def test_an_over_confident_drafter_was_further_off_before() -> None:
    reliability = Reliability()
    truth, before, _ = truth_and_belief(reliability, 2.0)
    teach(reliability, World(1, 2.0, NODES), 40)
    _, after, _ = truth_and_belief(reliability, 2.0)
    assert np.square(after - truth).mean() < 0.8 * np.square(before - truth).mean()
    assert abs(before.sum() / truth.sum() - 1) > 0.1


def test_what_narrow_rounds_showed_is_used_for_what_they_did_not_verify() -> None:
    reliability, world = Reliability(), World(1, 2.0, NODES)
    for _ in range(40):
        tree, _, target = world.round(200)
        widths = tree.counts.clamp(max=6)
        accepted = verify(tree, target, widths)
        learn(reliability, read_tree(tree, None), widths.numpy(), accepted_nodes(accepted, NODES))
    truth, expected, raw = truth_and_belief(reliability, 2.0)
    off = abs(expected.sum() - truth.sum())
    assert off < 0.5 * abs(raw.sum() - truth.sum())


def random_tree(seed: int, batch: int = 64) -> CandidateTree:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, 9, 8, generator=generator)
    return pack(DraftScores(logits.log_softmax(-1), torch.arange(8).expand_as(logits).contiguous()), 60)


@pytest.mark.parametrize("seed", range(6))
def test_no_family_outweighs_its_parent_whatever_was_learnt(seed: int) -> None:
    rng = np.random.default_rng(seed)
    reliability = Reliability()
    tree = random_tree(seed)
    read = read_tree(tree, torch.from_numpy(rng.choice([0.0, 0.3, 1.0, 1.4], 64)).float())
    for _ in range(4):
        # Acceptance that no tree could have: any node with any chance, light ones more than heavy ones.
        chance = rng.uniform(0, 1, (1, 60)) * np.linspace(0.1, 1.0, 60)
        learn(reliability, read, read.counts, rng.uniform(size=(64, 60)) < chance)
    expected = reliability.calibrate(read)
    assert (expected >= 0).all()
    assert not np.allclose(expected, read.masses)
    for request in range(64):
        families: dict[int, float] = {-1: 0.0}
        for node in range(int(read.counts[request])):
            parent = int(read.parents[request, node])
            above = 1.0 if parent < 0 else expected[request, parent]
            assert expected[request, node] <= above + 1e-9
            families[parent] = families.get(parent, 0.0) + expected[request, node]
        for parent, together in families.items():
            assert together <= (1.0 if parent < 0 else expected[request, parent]) + 1e-9


def test_temperatures_are_learnt_apart_and_lean_on_each_other() -> None:
    reliability = Reliability()
    teach(reliability, World(1, 2.0, NODES), 40)
    truth, unknown, raw = truth_and_belief(reliability, 2.0, temperature=1.0)
    assert abs(unknown.sum() - truth.sum()) < 0.5 * abs(raw.sum() - truth.sum())
    teach(reliability, World(2, 1.0, NODES), 40, temperature=1.0)
    truth, greedy, _ = truth_and_belief(reliability, 2.0)
    assert greedy.sum() == pytest.approx(truth.sum(), rel=0.03)
    truth, sampled, _ = truth_and_belief(reliability, 1.0, temperature=1.0)
    assert sampled.sum() == pytest.approx(truth.sum(), rel=0.03)


def test_a_drafter_whose_every_node_is_rejected_is_believed_no_more_within_a_few_rounds() -> None:
    reliability = Reliability()
    read = read_tree(random_tree(0, batch=1), None)
    for _ in range(8):
        learn(reliability, read, np.minimum(read.counts, 15), np.zeros((1, 60), dtype=bool))
    assert reliability.calibrate(read)[0, :15].sum() < 0.35 * read.masses[0, :15].sum()
    for _ in range(60):
        learn(reliability, read, np.minimum(read.counts, 15), np.zeros((1, 60), dtype=bool))
    assert reliability.calibrate(read).sum() < 0.1 * read.masses.sum()


def test_a_drafter_that_becomes_better_is_believed_again() -> None:
    reliability = Reliability()
    for _ in range(40):
        tree, _, _ = World(1, 1.0, NODES).round(200)
        learn(reliability, read_tree(tree, None), tree.counts.numpy(), np.zeros((200, NODES), dtype=bool))
    teach(reliability, World(2, 1.0, NODES), 100)
    truth, expected, _ = truth_and_belief(reliability, 1.0)
    assert expected.sum() == pytest.approx(truth.sum(), rel=0.15)


def test_masses_are_believed_before_anything_was_seen() -> None:
    read = read_tree(random_tree(1), None)
    reliability = Reliability()
    assert reliability.calibrate(read) is read.masses
    assert reliability.ratio == 1.0
    empty = HostTree(np.zeros((2, 0)), *(np.zeros((2, 0), dtype=np.int64),) * 2, np.zeros(2, dtype=np.int64), None)
    learn(reliability, empty, np.zeros(2, dtype=np.int64), np.zeros((2, 0), dtype=bool))
    assert reliability.request_rounds == 0


def test_predicted_and_achieved_are_reported_by_depth() -> None:
    reliability = Reliability()
    teach(reliability, World(1, 2.0, NODES), 8, batch=10)
    report = json.loads(json.dumps(reliability.report()))
    assert report["request_rounds"] == 80
    assert report["promised_round_length"] > report["predicted_round_length"] > 1
    assert report["predicted_round_length"] == pytest.approx(report["achieved_round_length"], rel=0.25)
    assert [entry["depth"] for entry in report["by_depth"]] == [1, 2, 3, 4, 5]
    accepted = [entry["accepted"] for entry in report["by_depth"]]
    assert accepted == sorted(accepted, reverse=True)
    assert sum(accepted) == pytest.approx(80 * (report["achieved_round_length"] - 1), rel=0.2)


def test_a_tree_is_read_as_it_is() -> None:
    tree = random_tree(2, batch=3)
    read = read_tree(tree, torch.tensor([0.0, 0.7, 1.5]))
    assert read.parents.tolist() == tree.parents.tolist()
    assert read.depths.tolist() == tree.depths.tolist()
    assert read.counts.tolist() == tree.counts.tolist()
    np.testing.assert_array_equal(read.masses, tree.masses.numpy().astype(np.float64))
    assert read.warmth is not None
    np.testing.assert_allclose(read.warmth, [0.0, 0.7, 1.5], rtol=1e-6)
