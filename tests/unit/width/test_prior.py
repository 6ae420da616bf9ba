"""What a drafter's folder says of its masses is where the engine starts, and is outweighed where it is wrong here."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cast_ray.errors import DrafterError
from cast_ray.width.host import OF_DRAFTER, OF_OTHERS, HostTree, accepted_nodes, read_tree
from cast_ray.width.prior import AcceptanceRecord
from cast_ray.width.reliability import DEPTHS, MASSES, Reliability, class_of_mass
from tests.unit.width.simulated_rounds import World, verify

NODES = 30


def measured(seed: int, sharpness: float, rounds: int = 20, batch: int = 200) -> AcceptanceRecord:
    """The record of a drafter that is as over-confident as its sharpness says."""
    world, sums = World(seed, sharpness, NODES), np.zeros((2, 1, DEPTHS, MASSES))
    for _ in range(rounds):
        tree, _, target = world.round(batch)
        read = read_tree(tree, None)
        on_path = accepted_nodes(verify(tree, target, tree.counts), NODES)
        real = read.depths > 0
        places = (0, read.depths[real] - 1, class_of_mass(read.masses[real]))
        np.add.at(sums[0], places, read.masses[real])
        np.add.at(sums[1], places, on_path[real])
    return AcceptanceRecord.of_counts(NODES, {0: rounds * batch, 1: 0}, *sums)


@pytest.fixture(scope="module")
def record() -> AcceptanceRecord:
    return measured(1, 2.0)


def other_trees(kinds: int | None = None) -> tuple[np.ndarray, HostTree]:
    tree, true_mass, _ = World(99, 2.0, NODES).round(2000)
    read = read_tree(tree, None)
    if kinds is not None:
        whose = np.full(read.masses.shape, kinds)
        read = HostTree(read.masses, read.parents, read.depths, read.counts, None, whose)
    return true_mass.numpy().astype(np.float64), read


def test_with_a_record_the_first_rounds_expectations_hold(record: AcceptanceRecord) -> None:
    truth, read = other_trees()
    believed = Reliability(record).calibrate(read)
    assert believed.sum() == pytest.approx(truth.sum(), rel=0.1)
    assert abs(read.masses.sum() / truth.sum() - 1) > 0.1
    assert np.square(believed - truth).mean() < 0.8 * np.square(read.masses - truth).mean()


def test_a_record_says_nothing_of_candidates_of_others(record: AcceptanceRecord) -> None:
    _, read = other_trees(OF_OTHERS)
    np.testing.assert_allclose(Reliability(record).calibrate(read), read.masses, rtol=1e-6)
    _, read = other_trees(OF_DRAFTER)
    assert not np.allclose(Reliability(record).calibrate(read), read.masses, rtol=0.05)


def test_a_record_that_is_wrong_here_is_outweighed_in_some_rounds(record: AcceptanceRecord) -> None:
    tree, _, _ = World(3, 2.0, NODES).round(1)
    read, nothing = read_tree(tree, None), np.zeros((1, NODES), dtype=bool)
    reliability = Reliability(record)
    first = reliability.calibrate(read).sum()
    for _ in range(48):
        reliability.observe(read, reliability.calibrate(read), read.counts, nothing)
    assert reliability.calibrate(read).sum() < 0.35 * first


def test_what_is_reported_is_what_was_seen_here(record: AcceptanceRecord) -> None:
    report = Reliability(record).report()
    assert report["request_rounds"] == 0
    assert report["by_depth"] == []


def test_rounds_of_others_do_not_fade_what_is_known_of_the_drafter(record: AcceptanceRecord) -> None:
    reliability = Reliability(record)
    _, own = other_trees()
    before = reliability.calibrate(own)
    _, read = other_trees(OF_OTHERS)
    for _ in range(16):
        reliability.observe(read, reliability.calibrate(read), read.counts, np.zeros(read.masses.shape, dtype=bool))
    np.testing.assert_allclose(reliability.calibrate(own), before, rtol=1e-6)
    assert reliability.calibrate(read).sum() < 0.2 * read.masses.sum()


def test_a_record_is_written_and_read_back(record: AcceptanceRecord) -> None:
    written = json.loads(json.dumps(record.to_dict()))
    (greedy,) = written["by_temperature"]
    assert greedy["rounds"] == 4000
    assert [row["depth"] for row in greedy["by_depth"]] == [1, 2, 3, 4, 5]
    assert greedy["by_depth"][0]["promised"] > greedy["by_depth"][0]["accepted"] > 0.3
    back = AcceptanceRecord.from_dict(written)
    assert (back.nodes, back.rounds) == (NODES, {0: 4000})
    np.testing.assert_allclose(back.promised[0], record.promised[0], atol=1e-5)
    np.testing.assert_allclose(back.accepted[0], record.accepted[0], atol=1e-5)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda r: r.pop("by_temperature"), "by_temperature"),
        (lambda r: r["by_temperature"].clear(), "by_temperature"),
        (lambda r: r["by_temperature"][0].update(rounds=0), "rounds"),
        (lambda r: r["by_temperature"][0]["by_depth"][0].update(depth=99), "depth"),
        (lambda r: r["by_temperature"][0]["by_depth"][0].update(promised_by_mass=["x"]), "promised_by_mass"),
        (lambda r: r["by_temperature"][0]["by_depth"][0].update(accepted_by_mass=[0.1] * 99), "accepted_by_mass"),
    ],
)
def test_a_damaged_record_is_named(record: AcceptanceRecord, damage: Any, named: str) -> None:
    written = record.to_dict()
    damage(written)
    with pytest.raises(DrafterError, match=rf"reliability\.{named}.*check-drafter --record"):
        AcceptanceRecord.from_dict(written)
