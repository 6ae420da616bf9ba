"""The numbers of a sweep: gains over the chain, predicted against oracle width, and how sure each of them is.

Gains and gaps are in percent and percentage points, as in the paper's Tables 2, 3 and 9. Uncertainty is the bootstrap's
over groups of prompts: what another draw of the same kinds of prompts would have shown.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cast_ray.stats.sweep import BALANCED, Array, Sweep

SAMPLES = 2000
INTERVAL = (2.5, 97.5)
ALL = "all"


@dataclass(frozen=True)
class Interval:
    """A value and its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


@dataclass(frozen=True)
class MethodRow:
    """One method on one domain: nodes a round, round length, decoding ms a token, gain over the chain and over AR."""

    domain: str
    method: str
    nodes: float
    round_length: float
    ms_a_token: float
    gain: Interval
    speedup: float


@dataclass(frozen=True)
class GapRow:
    """One chooser of widths on one domain. gap: its gain minus the best fixed width's, in points; 0 is the oracle."""

    domain: str
    chooser: str
    nodes: float
    gain: float
    oracle: int
    oracle_gain: float
    gap: Interval


class SweepTable:
    """All rows of a sweep; the same draws of prompts for all of them."""

    def __init__(self, sweep: Sweep, samples: int = SAMPLES) -> None:
        self.sweep = sweep
        self.domains = (ALL, *dict.fromkeys(sweep.domains)) if len(set(sweep.domains)) > 1 else (ALL,)
        self._fixed = [i for i, name in enumerate(sweep.methods) if width_of(name) is not None]
        chance = np.random.default_rng(0)
        self._draws: dict[str, list[Array]] = {}
        for domain in self.domains:
            rows = self._rows(domain)
            drawn = [rows, *(chance.choice(rows, len(rows)) for _ in range(samples))]
            self._draws[domain] = [self._gains(groups) for groups in drawn]

    def methods(self) -> list[MethodRow]:
        """Every method on every domain."""
        return [self._method(domain, place) for domain in self.domains for place in range(len(self.sweep.methods))]

    def gaps(self) -> list[GapRow]:
        """Table 2 with Table 3's intervals: the predicted width, and `joint`, against the oracle of each domain."""
        predicted = self.sweep.prediction.width
        choosers = [("deployment", "ar" if predicted == 0 else f"fixed:{predicted}"), ("joint", "joint")]
        return [self._gap(domain, name, method) for domain in self.domains for name, method in choosers]

    def shapes(self) -> list[MethodRow]:
        """Table 9: the chain, a balanced tree and the tree by mass, all of the chain's size."""
        names = ("chain", BALANCED, f"fixed:{self.sweep.chain_nodes}")
        return [row for row in self.methods() if row.method in names]

    def _rows(self, domain: str) -> Array:
        return np.array([i for i, name in enumerate(self.sweep.domains) if domain in (ALL, name)])

    def _gains(self, groups: Array) -> Array:
        """Percent by which each method beats the chain in tokens a second over these groups, [methods]."""
        speed = self.sweep.tokens[groups].sum(axis=0) / self.sweep.ms[groups].sum(axis=0)
        return 100 * (speed / speed[self.sweep.column("chain")] - 1)

    def _method(self, domain: str, place: int) -> MethodRow:
        sweep, rows = self.sweep, self._rows(domain)
        tokens, ms, rounds, nodes = (
            values[rows, place].sum() for values in (sweep.tokens, sweep.ms, sweep.rounds, sweep.nodes)
        )
        draws = np.array([gains[place] for gains in self._draws[domain]])
        plain = self._draws[domain][0][sweep.column("ar")]
        return MethodRow(
            domain=domain,
            method=sweep.methods[place],
            nodes=float(nodes / rounds),
            round_length=float(tokens / rounds),
            ms_a_token=float(ms / tokens),
            gain=_interval(draws),
            speedup=float((100 + draws[0]) / (100 + plain)),
        )

    def _gap(self, domain: str, chooser: str, method: str) -> GapRow:
        place = self.sweep.column(method)
        gaps = np.array([gains[place] - gains[self._fixed].max() for gains in self._draws[domain]])
        gains = self._draws[domain][0]
        best = self._fixed[int(gains[self._fixed].argmax())]
        rows = self._rows(domain)
        return GapRow(
            domain=domain,
            chooser=chooser,
            nodes=float(self.sweep.nodes[rows, place].sum() / self.sweep.rounds[rows, place].sum()),
            gain=float(gains[place]),
            oracle=width_of(self.sweep.methods[best]) or 0,
            oracle_gain=float(gains[best]),
            gap=_interval(gaps),
        )


def width_of(method: str) -> int | None:
    """Nodes of `ar` and `fixed:N`, the widths that an oracle chooses among; None for the rest."""
    if method == "ar":
        return 0
    return int(method.removeprefix("fixed:")) if method.startswith("fixed:") else None


def render(table: SweepTable) -> RenderableType:
    """The tables as they are printed."""
    predicted = table.sweep.prediction
    widths = Table("domain", "width", "nodes", "round length", "ms a token", "gain over chain %", "x AR", box=None)
    for row in table.methods():
        values = f"{row.nodes:.1f}", f"{row.round_length:.2f}", f"{row.ms_a_token:.2f}", str(row.gain)
        widths.add_row(row.domain, row.method, *values, f"{row.speedup:.2f}")
    gaps = Table("domain", "rule", "nodes", "gain %", "oracle N", "oracle gain %", "gap in points", box=None)
    for gap in table.gaps():
        gains = f"{gap.gain:+.1f}", str(gap.oracle), f"{gap.oracle_gain:+.1f}"
        gaps.add_row(gap.domain, gap.chooser, f"{gap.nodes:.1f}", *gains, str(gap.gap))
    shapes = Table("domain", "shape", "nodes", "round length", "ms a token", box=None)
    for row in table.shapes():
        name = "by mass" if row.method.startswith("fixed") else row.method
        shapes.add_row(row.domain, name, f"{row.nodes:.1f}", f"{row.round_length:.2f}", f"{row.ms_a_token:.2f}")
    early = "" if predicted.settled else " (too few rounds to calibrate: give more prompts)"
    return Group(
        Text("Every width", style="bold"),
        widths,
        Text(f"\nPredicted against best: N*={predicted.width} from the probe and calibration rounds{early}", "bold"),
        gaps,
        Text("\nShapes of equal size", style="bold"),
        shapes,
    )


def write_csv(table: SweepTable, folder: Path) -> list[Path]:
    """widths.csv, gaps.csv and runs.csv (every group by itself) in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "widths.csv": (
            ["domain", "method", "nodes", "R", "ms_per_token", *_spread("gain_pct"), "x_ar"],
            _widths(table),
        ),
        "gaps.csv": (
            ["domain", "rule", "nodes", "gain_pct", "oracle_N", "oracle_gain_pct", *_spread("gap_pp")],
            _gaps(table),
        ),
        "runs.csv": (["group", "domain", "method", "ms", "tokens", "rounds", "nodes"], _runs(table.sweep)),
    }
    paths = []
    for name, (header, rows) in files.items():
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(rows)
        paths.append(folder / name)
    return paths


def _widths(table: SweepTable) -> Iterator[list[object]]:
    for row in table.methods():
        gain = row.gain.value, row.gain.low, row.gain.high
        yield [row.domain, row.method, row.nodes, row.round_length, row.ms_a_token, *gain, row.speedup]


def _gaps(table: SweepTable) -> Iterator[list[object]]:
    for row in table.gaps():
        gap = row.gap.value, row.gap.low, row.gap.high
        yield [row.domain, row.chooser, row.nodes, row.gain, row.oracle, row.oracle_gain, *gap]


def _runs(sweep: Sweep) -> Iterator[list[object]]:
    for group, domain in enumerate(sweep.domains):
        for place, method in enumerate(sweep.methods):
            values = (values[group, place] for values in (sweep.ms, sweep.tokens, sweep.rounds, sweep.nodes))
            yield [group, domain, method, *values]


def _spread(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def _interval(draws: Array) -> Interval:
    """Of [1 + samples] values, the first of which is the measured one."""
    low, high = np.percentile(draws[1:] if len(draws) > 1 else draws, INTERVAL)
    return Interval(float(draws[0]), float(low), float(high))
