"""What the latency table promises: the measured points, the device's real shape, and nothing that noise drew."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cast_ray.errors import ConfigError
from cast_ray.width.curve import pool_adjacent
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable


def curve(ms: dict[int, float], batch: int = 1, context: int = 256, noise: float = 0.0) -> list[LatencyPoint]:
    return [LatencyPoint(tokens, batch, context, value, noise) for tokens, value in ms.items()]


STEPS = {1: 10.0, 16: 10.2, 17: 14.0, 32: 14.2, 33: 20.0, 64: 21.0}


def full_table() -> LatencyTable:
    points = [
        *curve(STEPS),
        *curve({4: 11.0, 32: 15.0, 128: 40.0}, batch=4),
        *curve({1: 12.0, 64: 25.0}, context=4096),
        *curve({4: 20.0}, batch=4, context=8192),
    ]
    draft = [DraftPoint(1, 256, 2.0), DraftPoint(1, 4096, 3.0), DraftPoint(4, 256, 4.0, 0.1)]
    return LatencyTable(points, draft, host_ms=0.5)


def test_measured_points_are_met_exactly_and_steps_stay() -> None:
    table = full_table()
    for point in table.verify:
        assert float(table.verify_ms(point.tokens, point.batch, point.context)) == pytest.approx(point.ms, abs=1e-9)


def test_between_measured_token_counts_time_is_linear() -> None:
    table = LatencyTable(curve({1: 10.0, 9: 18.0, 17: 50.0}))
    np.testing.assert_allclose(table.verify_ms([1, 3, 9, 13], 1, 256), [10.0, 12.0, 18.0, 34.0])
    assert table.verify_ms([[3, 9]], 1, 256).shape == (1, 2)


def test_beyond_the_largest_count_the_last_slope_goes_on_and_never_falls() -> None:
    assert float(LatencyTable(curve({1: 10.0, 10: 19.0})).verify_ms(20, 1, 256)) == pytest.approx(29.0)
    assert float(LatencyTable(curve({1: 2.0, 10: 9.0, 20: 5.0})).verify_ms(40, 1, 256)) == pytest.approx(5.0)
    assert float(LatencyTable(curve({8: 10.0})).verify_ms(64, 1, 256)) == pytest.approx(10.0)


def test_a_dip_within_the_noise_is_flattened() -> None:
    table = LatencyTable(curve({1: 10.0, 2: 11.0, 4: 10.6, 8: 12.0}, noise=0.3))
    predicted = table.verify_ms([1, 2, 3, 4, 8], 1, 256)
    np.testing.assert_allclose(predicted, [10.0, 10.8, 10.8, 10.8, 12.0])


def test_a_real_dip_is_kept() -> None:
    ms = {1: 10.0, 2: 11.0, 4: 8.0, 8: 12.0}
    table = LatencyTable(curve(ms, noise=0.3))
    np.testing.assert_allclose(table.verify_ms(list(ms), 1, 256), list(ms.values()))


def test_the_surer_point_of_a_dip_counts_for_more() -> None:
    points = [LatencyPoint(1, 1, 256, 12.0, 2.0), LatencyPoint(2, 1, 256, 10.0, 0.1)]
    assert LatencyTable(points).verify_ms([1, 2], 1, 256) == pytest.approx([10.0, 10.0], abs=0.01)


def test_many_falls_within_the_noise_do_not_hide_a_large_one() -> None:
    values = np.array([10.0, 10.0, 9.9, 5.0])
    pooled = pool_adjacent(values, np.ones(4), np.full(4, 0.1))
    np.testing.assert_allclose(pooled, [29.9 / 3] * 3 + [5.0])


def test_isotonic_pooling_keeps_the_sum_and_never_falls() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        values, weights = rng.normal(size=20), rng.uniform(0.1, 3, size=20)
        pooled = pool_adjacent(values, weights, np.full(20, np.inf))
        assert (np.diff(pooled) >= 0).all()
        assert (pooled * weights).sum() == pytest.approx((values * weights).sum())


def test_between_batches_and_contexts_time_is_interpolated_and_clamped_at_the_ends() -> None:
    table = LatencyTable([*curve({8: 10.0}), *curve({8: 14.0}, batch=5), *curve({8: 30.0}, context=1256)])
    assert float(table.verify_ms(8, 2, 256)) == pytest.approx(11.0)
    assert float(table.verify_ms(8, 99, 256)) == pytest.approx(14.0)
    assert float(table.verify_ms(8, 1, 756)) == pytest.approx(20.0)
    assert float(table.verify_ms(8, 1, 0)) == pytest.approx(10.0)
    assert float(table.verify_ms(8, 1, 10**6)) == pytest.approx(30.0)


def test_a_batch_measured_at_few_counts_has_its_steps_where_the_device_has_them() -> None:
    table = LatencyTable([*curve(STEPS), *curve({4: 11.0, 64: 23.0}, batch=4)])
    ms = table.verify_ms(np.arange(4, 65), 4, 256)
    rises = np.diff(ms)
    assert (rises >= -1e-9).all()
    assert set(np.argsort(rises)[-2:] + 5) == {17, 33}


def test_a_sparse_batch_between_two_equal_points_of_it_shows_no_dip() -> None:
    table = LatencyTable([*curve({1: 10.0, 64: 10.0, 65: 20.0, 128: 20.0}), *curve({32: 10.0, 128: 12.0}, batch=4)])
    assert (np.diff(table.verify_ms(np.arange(4, 129), 4, 256)) >= -1e-9).all()


def test_a_linear_device_is_predicted_at_batches_that_were_not_measured() -> None:
    points = [*curve({n: 2.0 * n for n in (1, 2, 4, 64)}), *curve({8: 16.0, 256: 512.0}, batch=8)]
    table = LatencyTable(points)
    np.testing.assert_allclose(table.verify_ms([5, 30, 200], 5, 256), [10.0, 60.0, 400.0])


def test_every_request_of_a_batch_pays_for_its_own_context() -> None:
    table = LatencyTable([*curve({1: 10.0, 64: 20.0}), *curve({1: 13.0, 64: 26.0}, context=4096)])
    base = float(table.verify_ms(8, 8, 256))
    assert float(table.verify_ms(8, 8, 4096)) == pytest.approx(base + 8 * 3.0)


def test_a_round_is_draft_and_verify_and_host() -> None:
    table = full_table()
    assert table.draft_ms(1, 256) == 2.0
    assert table.draft_ms(1, 2176) == pytest.approx(2.5)
    assert table.draft_ms(2, 256) == pytest.approx(2.0 + 2.0 / 3)
    np.testing.assert_allclose(table.round_ms([0, 15], 1, 256, drafting=True), [12.5, 12.7])
    np.testing.assert_allclose(table.round_ms([0], 1, 256, drafting=False), [10.5])
    np.testing.assert_allclose(table.round_ms([31], 4, 256, drafting=True), [44.5])


def test_a_table_survives_json() -> None:
    table = full_table()
    again = LatencyTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again.to_dict() == table.to_dict()
    nodes = np.arange(100)
    for batch, context in ((1, 256), (3, 1000), (4, 9000)):
        np.testing.assert_array_equal(
            again.round_ms(nodes, batch, context, True), table.round_ms(nodes, batch, context, True)
        )


def test_a_device_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"latency\.verify=.*no measured point"):
        LatencyTable([])
    with pytest.raises(ConfigError, match=r"latency\.draft=.*no measured point"):
        LatencyTable(curve(STEPS)).draft_ms(1, 256)


def _set(path: list[Any], value: object) -> Callable[[dict[str, Any]], None]:
    def damage(saved: dict[str, Any]) -> None:
        at: Any = saved
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return damage


def _drop(path: list[Any]) -> Callable[[dict[str, Any]], None]:
    def damage(saved: dict[str, Any]) -> None:
        at: Any = saved
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return damage


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (_set(["version"], 99), r"latency\.version=99"),
        (_drop(["version"]), r"latency\.version=None"),
        (_drop(["verify"]), r"latency\.verify=None"),
        (_set(["draft"], {}), r"latency\.draft="),
        (_drop(["host_ms"]), r"latency\.host_ms=None"),
        (_set(["host_ms"], -1), r"latency\.host_ms=-1"),
        (_drop(["verify", 1, "ms"]), r"latency\.verify\[1\]="),
        (_set(["verify", 1], 7), r"latency\.verify\[1\]=7"),
        (_set(["verify", 2, "ms"], "fast"), r"latency\.verify\[2\]\.ms='fast'"),
        (_set(["verify", 2, "ms"], float("nan")), r"latency\.verify\[2\]\.ms=nan"),
        (_set(["verify", 2, "ms"], 0), r"latency\.verify\[2\]\.ms=0"),
        (_set(["verify", 0, "tokens"], 0), r"latency\.verify\[0\]\.tokens=0"),
        (_set(["verify", 0, "tokens"], 1.5), r"latency\.verify\[0\]\.tokens=1\.5"),
        (_set(["verify", 0, "batch"], True), r"latency\.verify\[0\]\.batch=True"),
        (_set(["draft", 0, "noise_ms"], -0.1), r"latency\.draft\[0\]\.noise_ms=-0\.1"),
        (_set(["draft", 0, "extra"], 1), r"latency\.draft\[0\]="),
    ],
)
def test_a_damaged_table_names_the_field(damage: Callable[[dict[str, Any]], None], field: str) -> None:
    saved = full_table().to_dict()
    damage(saved)
    with pytest.raises(ConfigError, match=field):
        LatencyTable.from_dict(saved)


def test_what_is_no_mapping_is_no_table() -> None:
    with pytest.raises(ConfigError, match=r"latency=\[\]: is no mapping"):
        LatencyTable.from_dict([])
