"""The rules on the CAST paper's published numbers (Tables 5, 7, 8, 9, 12, 15; `tests/data/paper`, a part of each)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay import Setting, choose, latency, oracle, read, replay, round_lengths, slope_per_doubling

SETTINGS = {setting.name: setting for setting in read(Path(__file__).parents[1] / "data" / "paper")}
SLOPE = slope_per_doubling(SETTINGS.values())
# Percentage points that a rule may lose against the sweep's best width.
MOST_GAP = 0.5


def gap(setting: Setting, rule: str) -> float:
    (found,) = replay(setting, [rule], SLOPE)
    return oracle(setting)[1] - found.gain


@pytest.mark.parametrize("name", ["blackwell-qwen3-8b", "blackwell-qwen3-4b", "h100sxm-qwen3-8b"])
def test_joint_is_within_half_a_point_of_the_full_sweep(name: str) -> None:
    assert gap(SETTINGS[name], "joint") <= MOST_GAP


@pytest.mark.parametrize("rule", ["fixed:127", "fixed:63", "round"])
def test_neither_the_widest_tree_nor_the_papers_width_nor_a_convex_stop_is(rule: str) -> None:
    assert gap(SETTINGS["blackwell-qwen3-8b"], rule) > MOST_GAP


def test_the_width_stands_at_the_edge_of_the_cliff() -> None:
    setting = SETTINGS["blackwell-qwen3-8b"]
    assert choose("joint", round_lengths(setting, SLOPE), latency(setting)) == 95


def test_round_lengths_are_the_published_ones_where_they_are_published() -> None:
    lengths = round_lengths(SETTINGS["blackwell-qwen3-8b"], SLOPE)
    assert lengths[0] == 1.0
    assert lengths[15] == pytest.approx((6.71 + 3.90 + 7.26) / 3)
    assert lengths[63] == pytest.approx((7.97 + 4.40 + 8.51) / 3)
    assert lengths[127] > lengths[63]


@pytest.mark.parametrize("share", [0.75, 1.5])
def test_the_choice_does_not_hang_on_the_extrapolated_slope(share: float) -> None:
    setting = SETTINGS["blackwell-qwen3-4b"]
    assert choose("joint", round_lengths(setting, share * SLOPE), latency(setting)) == 127
