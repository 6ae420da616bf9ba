"""What following measured times promises: stalls pass, lasting changes are met within a few rounds, noise averages."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cast_ray.width.drift import Correction, Level


@pytest.mark.parametrize("stall", [5.0, 50.0, 1e6])
def test_a_stall_leaves_the_level_where_it_was(stall: float) -> None:
    level, rng = Level(), np.random.default_rng(0)
    for _ in range(50):
        level.observe(0.02 * rng.standard_normal())
    for _ in range(2):
        level.observe(math.log(stall))
        assert abs(level.value) < 0.02
    level.observe(0.0)
    level.observe(math.log(stall))
    assert abs(level.value) < 0.03


def test_a_stall_in_the_very_first_round_does_little() -> None:
    level = Level()
    level.observe(math.log(100.0))
    assert abs(level.value) < 0.1


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0, 3.0])
def test_a_lasting_change_is_met_within_three_rounds(factor: float) -> None:
    level, rng = Level(), np.random.default_rng(1)
    for _ in range(100):
        level.observe(0.03 * rng.standard_normal())
    for _ in range(3):
        level.observe(math.log(factor) + 0.03 * rng.standard_normal())
    assert level.value == pytest.approx(math.log(factor), abs=0.08)


def test_slow_drift_is_followed_and_noise_averaged() -> None:
    level, rng = Level(), np.random.default_rng(2)
    far = []
    for step in range(2000):
        truth = 0.3 * math.sin(step / 300)
        level.observe(truth + 0.1 * rng.standard_normal())
        far.append(abs(level.value - truth))
    assert np.mean(far[100:]) < 0.035


def test_a_correction_learns_the_device_and_its_shape() -> None:
    correction, rng = Correction(), np.random.default_rng(3)
    truth = {16.0: 1.5, 64.0: 1.5, 256.0: 3.0}
    for _ in range(200):
        for tokens, factor in truth.items():
            correction.observe(tokens, 10.0, 10.0 * factor * (1 + 0.05 * rng.standard_normal()))
    found = correction.factor(np.array([*truth, 128.0]))
    np.testing.assert_allclose(found[:3], list(truth.values()), rtol=0.1)
    assert 1.6 < found[3] < 2.9


def test_a_slow_device_is_expected_to_be_slow_at_counts_that_it_has_not_run() -> None:
    correction = Correction()
    for _ in range(20):
        correction.observe(16, 10.0, 25.0)
    np.testing.assert_allclose(correction.factor(np.array([1.0, 512.0])), 2.5, rtol=0.1)


def test_times_that_are_no_times_are_passed_over() -> None:
    correction = Correction()
    correction.observe(16, 0.0, 5.0)
    correction.observe(16, 5.0, 0.0)
    assert correction.factor(np.array([16.0])).tolist() == [1.0]


def test_what_was_found_true_again_is_remembered_longer() -> None:
    """Narrow rounds are fast, wide ones four times slower than the table has them: how long is that known?"""

    def forgotten_after(correction: Correction) -> int:
        for rounds in range(1000):
            correction.observe(4, 1.0, 1.0)
            if correction.factor(np.array([64.0]))[0] < 1.5:
                return rounds
        return 1000

    correction = Correction()
    lasted = []
    for _ in range(3):
        for _ in range(6):
            correction.observe(4, 1.0, 1.0)
        for _ in range(6):
            correction.observe(64, 1.0, 4.0)
        lasted.append(forgotten_after(correction))
    assert lasted[0] < lasted[1] < lasted[2]
