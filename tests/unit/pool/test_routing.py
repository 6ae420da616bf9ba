"""Rows go where they are predicted to finish first, and predictions follow what engines really do."""

from __future__ import annotations

import pytest

from cast_ray.pool.routing import EngineLoad, RateMeter, TokenEstimate, choose


def measured(tokens_per_s: float) -> RateMeter:
    meter = RateMeter()
    meter.advance(0.0, busy=False)
    meter.advance(1.0, busy=True, tokens=round(tokens_per_s))
    return meter


def test_engines_not_yet_measured_share_rows_equally() -> None:
    loads = [EngineLoad(slots=10) for _ in range(3)]
    for _ in range(9):
        index = choose(loads, 5.0)
        assert index is not None
        loads[index].rows += 1
        loads[index].tokens += 5.0
    assert [load.rows for load in loads] == [3, 3, 3]


def test_rows_are_shared_in_proportion_to_measured_rates() -> None:
    loads = [EngineLoad(slots=1000, meter=measured(rate)) for rate in (10, 20, 40)]
    for _ in range(70):
        index = choose(loads, 1.0)
        assert index is not None
        loads[index].rows += 1
        loads[index].tokens += 1.0
    assert [load.rows for load in loads] == pytest.approx([10, 20, 40], abs=1)


def test_a_full_engine_gets_nothing_however_fast_it_is() -> None:
    loads = [EngineLoad(slots=1, rows=1, meter=measured(1000)), EngineLoad(slots=1, meter=measured(1))]
    assert choose(loads, 1.0) == 1
    loads[1].rows = 1
    assert choose(loads, 1.0) is None


def test_the_rate_counts_busy_time_only_and_follows_a_change() -> None:
    meter = RateMeter(half_life_s=1.0)
    assert meter.tokens_per_s is None
    meter.advance(0.0, busy=False)
    meter.advance(2.0, busy=True, tokens=20)
    meter.advance(100.0, busy=False)
    assert meter.tokens_per_s == pytest.approx(10.0)
    for second in range(101, 121):
        meter.advance(float(second), busy=True, tokens=40)
    assert meter.tokens_per_s == pytest.approx(40.0, rel=0.5)


def test_the_expected_length_is_the_mean_so_far_within_the_limit_of_the_row() -> None:
    estimate = TokenEstimate()
    assert estimate.expect(64) == 64
    estimate.observe(10)
    estimate.observe(20)
    assert estimate.expect(64) == 15
    assert estimate.expect(8) == 8
