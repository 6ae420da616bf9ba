"""A sweep's numbers: gains are of whole domains, the oracle is the best fixed width, and the gap is against it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cast_ray.stats.plots import plot_sweep
from cast_ray.stats.sweep import Item, Prediction, Sweep, group_items
from cast_ray.stats.sweep_table import SweepTable, render, width_of, write_csv

METHODS = ("ar", "chain", "fixed:7", "fixed:15", "balanced", "joint")


def sweep(predicted: int, ms: np.ndarray, domains: tuple[str, ...]) -> Sweep:
    """Ten tokens a run; ms: [groups, methods]."""
    tokens = np.full(ms.shape, 10.0)
    rounds = tokens / np.array([1.0, 1.5, 2.0, 2.5, 1.25, 2.0])
    nodes = rounds * np.array([0.0, 7.0, 7.0, 15.0, 7.0, 9.0])
    curve = np.linspace(1.0, 2.0, 16)
    prediction = Prediction(predicted, True, 1, 100, 10 * curve, curve)
    return Sweep(METHODS, domains, ms, tokens, rounds, nodes, 7, prediction)


def two_domains(predicted: int = 7) -> SweepTable:
    """On `a` 15 nodes are best, on `b` 7; over both it is 7."""
    a = [200.0, 100.0, 80.0, 50.0, 110.0, 60.0]
    b = [200.0, 100.0, 50.0, 100.0, 110.0, 50.0]
    return SweepTable(sweep(predicted, np.array([a, a, b, b]), ("a", "a", "b", "b")), samples=200)


def test_gains_are_over_the_chain_in_tokens_a_second() -> None:
    rows = {(row.domain, row.method): row for row in two_domains().methods()}
    assert rows["a", "fixed:15"].gain.value == pytest.approx(100.0)
    assert rows["a", "ar"].gain.value == pytest.approx(-50.0)
    assert rows["a", "fixed:15"].speedup == pytest.approx(4.0)
    assert rows["all", "fixed:7"].gain.value == pytest.approx(100 * (400 / 260 - 1))
    assert rows["all", "fixed:15"].round_length == pytest.approx(2.5)
    assert rows["all", "joint"].nodes == pytest.approx(9.0)
    assert rows["all", "joint"].ms_a_token == pytest.approx(5.5)


def test_the_gap_is_against_the_best_fixed_width_of_each_domain() -> None:
    gaps = {(row.domain, row.chooser): row for row in two_domains().gaps()}
    assert (gaps["all", "deployment"].oracle, gaps["all", "deployment"].gap.value) == (7, pytest.approx(0.0))
    assert gaps["a", "deployment"].oracle == 15
    assert gaps["a", "deployment"].gap.value == pytest.approx(25.0 - 100.0)
    # A rule that is no fixed width may beat them all.
    assert gaps["all", "joint"].gap.value == pytest.approx(100 * (400 / 220 - 400 / 260))


def test_a_predicted_width_of_none_is_plain_decoding() -> None:
    gap = next(row for row in two_domains(predicted=0).gaps() if row.domain == "a" and row.chooser == "deployment")
    assert gap.gain == pytest.approx(-50.0)
    assert width_of("ar") == 0
    assert width_of("chain") is None


def test_intervals_span_what_other_draws_of_prompts_would_show() -> None:
    same = next(row for row in two_domains().methods() if (row.domain, row.method) == ("a", "fixed:7")).gain
    assert same.low == same.high == pytest.approx(same.value)
    mixed = next(row for row in two_domains().methods() if (row.domain, row.method) == ("all", "fixed:7")).gain
    assert mixed.low < mixed.value < mixed.high
    assert mixed.low >= 25.0 - 1e-6
    assert mixed.high <= 100.0 + 1e-6


def test_shapes_are_compared_at_the_chains_size() -> None:
    assert [row.method for row in two_domains().shapes() if row.domain == "all"] == ["chain", "fixed:7", "balanced"]


def test_everything_is_printed_written_and_drawn(tmp_path: Path) -> None:
    table = two_domains()
    console = Console(width=160, record=True, quiet=False, file=(tmp_path / "out.txt").open("w"))
    console.print(render(table))
    text = console.export_text()
    assert "N*=7" in text
    assert "by mass" in text
    paths = write_csv(table, tmp_path / "out")
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(METHODS)
    assert float(next(r for r in rows if r["domain"] == "a" and r["method"] == "fixed:15")["gain_pct"]) == 100.0
    with paths[2].open() as file:
        assert len(list(csv.DictReader(file))) == 4 * len(METHODS)
    assert plot_sweep(table, tmp_path / "out" / "sweep.png").stat().st_size > 10_000


def test_groups_hold_one_domain_each() -> None:
    items = [Item([number], "ab"[number % 2]) for number in range(5)]
    groups = group_items(items, 2)
    assert [[item.prompt[0] for item in group] for group in groups] == [[0, 2], [4], [1, 3]]
