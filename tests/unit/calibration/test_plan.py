"""The plan of a probe finds steps and dips, and wastes nothing on straight, flat or noisy curves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cast_ray.calibration.plan import coarse_counts, next_count

MOST = 128


def closer(ms: Callable[[int], float], noise: float = 0.0, limit: int = 12) -> tuple[dict[int, float], int]:
    """The coarse points and up to `limit` more: the curve measured, and how many were added."""
    curve = {count: (ms(count), noise) for count in coarse_counts(MOST)}
    coarse = len(curve)
    while len(curve) < coarse + limit and (count := next_count(curve)) is not None:
        assert count not in curve
        curve[count] = (ms(count), noise)
    return {count: value for count, (value, _) in curve.items()}, len(curve) - coarse


def errors(ms: Callable[[int], float], points: dict[int, float]) -> np.ndarray:
    """Relative error at every count of straight lines between the points."""
    counts = np.arange(1, MOST + 1)
    known = sorted(points)
    true = np.array([ms(int(count)) for count in counts])
    return np.abs(np.interp(counts, known, [points[c] for c in known]) - true) / true


def test_coarse_counts_double_and_reach_the_end() -> None:
    assert coarse_counts(1) == [1]
    assert coarse_counts(2) == [1, 2]
    assert coarse_counts(24) == [1, 2, 4, 8, 16, 17, 24]
    assert coarse_counts(128) == [1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128]


@pytest.mark.parametrize("ms", [lambda n: 20.0, lambda n: 20.0 + 0.3 * n, lambda n: 2.0 * n])
def test_flat_and_straight_curves_get_no_more_points(ms: Callable[[int], float]) -> None:
    assert closer(ms)[1] == 0


@pytest.mark.parametrize("edge", [20, 48, 72, 96, 104])
def test_a_step_is_closed_in_on(edge: int) -> None:
    def ms(count: int) -> float:
        return 24.0 if count <= edge else 30.0

    points, added = closer(ms)
    assert 0 < added <= 8
    low = max(count for count, value in points.items() if value == 24.0)
    high = min(count for count, value in points.items() if value == 30.0)
    assert low <= edge < high
    assert high - low <= max(1, math.ceil(edge / 16))


def test_several_steps_on_a_slope_share_the_points() -> None:
    def ms(count: int) -> float:
        return 10.0 + 4.0 * math.ceil(count / 32) + 0.02 * count

    points, _ = closer(ms)
    # Where a step stands between two points, a straight line is off by most of the step just before it.
    off = errors(ms, points)
    assert np.mean(off > 0.05) < 0.06
    assert off.max() < 0.25


def test_noise_is_not_closed_in_on() -> None:
    chance = np.random.default_rng(0)
    spent = []
    for _ in range(20):
        wobble = dict.fromkeys(range(1, MOST + 1), 0.0)
        wobble = {count: float(chance.normal(0, 1.0)) for count in wobble}
        spent.append(closer(lambda n, w=wobble: 30.0 + w[n], noise=1.0)[1])
    assert np.mean(spent) < 1.0


def test_a_step_above_the_noise_is_found_all_the_same() -> None:
    points, added = closer(lambda n: 20.0 + (n % 3) * 0.2 + (10.0 if n > 40 else 0.0), noise=0.3)
    assert added > 0
    assert {40, 48} & set(points) or any(36 <= count <= 46 for count in points)
