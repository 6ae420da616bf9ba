"""What the joint choice promises: the optimum of an exhaustive search over the widths of all requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from cast_ray.width.merge import best_rate, merge

CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda n: 10.0 + 0 * n,
    "linear": lambda n: 5.0 + 0.6 * n,
    "convex": lambda n: 8.0 + 0.05 * n**2,
    "steps": lambda n: 8.0 + 2.0 * (n > 3) + 2.0 * (n > 7),
    "dip": lambda n: 9.0 + 0.8 * n - 3.0 * (n == 6),
    "cliff": lambda n: 8.0 + 20.0 * (n > 8),
    "jagged": lambda n: 8.0 + 3 * np.abs(np.sin(9.0 * n)),
}


def net_of(widths: tuple[int, ...], masses: np.ndarray, prices: np.ndarray, ms: np.ndarray, rate: float) -> float:
    gain = sum(masses[request, :width].sum() for request, width in enumerate(widths))
    return float(gain - rate * (ms[sum(widths)] + np.dot(widths, prices)))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("priced", [False, True])
def test_no_other_widths_are_worth_more(curve: str, priced: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        masses = -np.sort(-(rng.uniform(0, 1, (3, 4)) ** 2))
        prices = rng.uniform(-0.4, 0.4, 3) * priced
        counts = rng.integers(0, 5, 3)
        ms = CURVES[curve](np.arange(13.0))
        rate = rng.uniform(0.02, 0.6)
        choice = merge(masses[None], counts[None], prices, ms, rate)
        chosen = tuple(choice.widths[0].tolist())
        assert all(width <= count for width, count in zip(chosen, counts, strict=True))
        options = itertools.product(*(range(count + 1) for count in counts))
        best = max(net_of(widths, masses, prices, ms, rate) for widths in options)
        assert net_of(chosen, masses, prices, ms, rate) == pytest.approx(best, abs=1e-12)
        assert choice.gain[0] == pytest.approx(net_of(chosen, masses, prices * 0, ms * 0, rate))
        assert choice.ms[0] == pytest.approx(ms[sum(chosen)] + np.dot(chosen, prices))
        assert choice.nodes[0] == sum(chosen)


def test_one_request_may_get_all_and_another_nothing() -> None:
    masses = np.array([[0.05, 0.01, 0.01, 0.01], [0.99, 0.9, 0.8, 0.7]])
    choice = merge(masses[None], np.array([[4, 4]]), np.zeros(2), 5.0 + np.arange(9.0), rate=0.5)
    assert choice.widths.tolist() == [[0, 4]]


def test_the_request_with_the_longer_context_gets_fewer_nodes() -> None:
    masses = np.tile(0.9 ** np.arange(1, 9), (2, 1))
    ms = 5.0 + np.arange(17.0)
    choice = merge(masses[None], np.array([[8, 8]]), np.array([-0.3, 0.3]), ms, rate=0.5)
    assert choice.widths[0, 0] > choice.widths[0, 1] > 0


def test_a_node_heavier_than_one_before_it_waits_for_that_one() -> None:
    masses = np.array([[0.5, 0.1, 0.4], [0.3, 0.25, 0.2]])
    for total in range(7):
        choice = merge(masses[None], np.array([[3, 3]]), np.zeros(2), np.where(np.arange(7) == total, 0.0, 99.0), 1.0)
        assert choice.widths.sum() == total
    # With two nodes the better of what can be had is 0.5 and 0.3, not 0.5 and 0.4.
    choice = merge(masses[None], np.array([[3, 3]]), np.zeros(2), np.where(np.arange(7) == 2, 0.0, 99.0), 1.0)
    assert choice.widths.tolist() == [[1, 1]]


def test_equal_choices_are_the_narrower_one() -> None:
    choice = merge(np.zeros((1, 2, 3)), np.array([[3, 3]]), np.zeros(2), np.full(7, 4.0), rate=1.0)
    assert choice.widths.tolist() == [[0, 0]]


def test_at_least_so_many_are_verified_where_there_are_so_many() -> None:
    masses, ms = np.full((1, 2, 3), 0.01), 4.0 + np.arange(7.0)
    assert merge(masses, np.array([[3, 3]]), np.zeros(2), ms, 1.0).nodes.tolist() == [0]
    assert merge(masses, np.array([[3, 3]]), np.zeros(2), ms, 1.0, least=4).nodes.tolist() == [4]
    assert merge(masses, np.array([[2, 1]]), np.zeros(2), ms, 1.0, least=4).nodes.tolist() == [3]


def test_several_rounds_are_decided_as_each_alone() -> None:
    rng = np.random.default_rng(3)
    masses = -np.sort(-rng.uniform(0, 1, (5, 3, 6)))
    counts, prices, ms = rng.integers(0, 7, (5, 3)), rng.uniform(-0.1, 0.1, 3), 5 + rng.uniform(0, 4, 19).cumsum()
    together = merge(masses, counts, prices, ms, 0.2)
    for index in range(5):
        alone = merge(masses[index : index + 1], counts[index : index + 1], prices, ms, 0.2)
        assert together.widths[index].tolist() == alone.widths[0].tolist()
        assert together.gain[index] == pytest.approx(alone.gain[0])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("start", [1e-3, 0.1, 10.0])
def test_the_fixed_point_is_the_best_ratio_of_tokens_and_time(curve: str, start: float) -> None:
    masses = 0.9 * 0.8 ** np.arange(12.0)
    ms = CURVES[curve](np.arange(13.0))
    ratios = (1 + np.concatenate([[0.0], masses.cumsum()])) / ms
    found = best_rate(masses[None, None], np.array([[12]]), np.zeros(1), ms, committed=1, start=start)
    assert found == pytest.approx(ratios.max(), rel=1e-4)
