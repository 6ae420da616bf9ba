"""The width rules on the CAST paper's own tables: which width each would choose, and what that width really brought.

    python benchmarks/replay.py [--data FOLDER]

No model runs. What is assumed, and nothing else:

- Verification takes what Table 5 says at the measured token counts (n = N + 1), and lies on straight lines between
  them. The table gives no noise, so every step and dip of it is taken for real.
- A round also drafts and works on the host. That time is the chain's: its ms per token times its round length (Tables 8
  and 9, or 12) less the verification of the chain's 16 tokens.
- R(N) comes from the published round lengths alone (Tables 7, 9, 12, 15), never from the gains. The points of the
  widths that are given are joined by straight lines in log2(N + 1), for trees bring about as much with each doubling.
  Beyond the last point the last slope goes on. Where only N = 15 is given, the slope per doubling from there on is
  that of the settings which do give a wider tree, over R at 15, averaged.
- The rules choose one width for a setting, from R averaged over its domains, as the paper's Table 2 does. With one
  request and one mean profile `joint`, whose own code is run here, and `deployment` ask for the same thing: the maximum
  of R(N) / L(N) over every N. `round` stops at the first node that does not improve on its convex fit.
- What a width brought is looked up in the published sweeps (Tables 8 and 12), so only their widths can be scored: a
  choice between two of them is taken for the wider one below it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cast_ray.width.caddtree import convex_fit
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from cast_ray.width.merge import best_rate, merge

DATA = Path(__file__).parents[2] / "shared" / "data" / "paper"
CHAIN_TOKENS = 16
MOST_NODES = 127
CONTEXT = 1024


@dataclass(frozen=True)
class Setting:
    """One device and target.

    verify: n -> ms. lengths: domain -> N -> R, without the chain. chain: domain -> (ms per token, R).
    gains: domain -> N -> % over the chain.
    """

    name: str
    verify: dict[int, float]
    lengths: dict[str, dict[int, float]]
    chain: dict[str, tuple[float, float]]
    gains: dict[str, dict[int, float]]


@dataclass(frozen=True)
class Outcome:
    """A rule's width, the sweep's width that stands for it, and the mean gain (%) there."""

    rule: str
    nodes: int
    scored: int
    gain: float


def read(folder: Path) -> list[Setting]:
    """The settings for which latency, round lengths and a sweep are given."""
    verify: dict[str, dict[int, float]] = {}
    for row in _rows(folder / "verify_latency_ms.csv"):
        verify.setdefault(row["setting"], {})[int(row["n"])] = float(row["latency_ms"])
    lengths: dict[str, dict[str, dict[int, float]]] = {}
    for row in _rows(folder / "round_length.csv"):
        if row["N"] != "0":
            lengths.setdefault(row["setting"], {}).setdefault(row["domain"], {})[int(row["N"])] = float(row["R"])
    chain: dict[str, dict[str, tuple[float, float]]] = {}
    gains: dict[str, dict[str, dict[int, float]]] = {}
    for row in _rows(folder / "width_sweep_gain_pct.csv"):
        name, domain = f"{row['gpu']}-{row['target']}", row["domain"]
        chain.setdefault(name, {})[domain] = float(row["chain_ms_per_token"]), float(row["chain_R"])
        gains.setdefault(name, {})[domain] = {int(k[1:]): float(v) for k, v in row.items() if k[0] == "N"}
    name = "h100sxm-qwen3-8b"
    for row in _rows(folder / "h100_width_sweep_ms.csv"):
        ms, domain = float(row["chain_ms"]), row["domain"]
        if domain in lengths[name]:
            chain.setdefault(name, {})[domain] = ms, float(row["R_chain"])
            swept = {int(k[1:]): 100 * (ms / float(v) - 1) for k, v in row.items() if k[0] == "N"}
            gains.setdefault(name, {})[domain] = swept
    return [Setting(name, verify[name], lengths[name], chain[name], gains[name]) for name in sorted(gains)]


def slope_per_doubling(settings: Iterable[Setting]) -> float:
    """What a doubling of the tree adds beyond N = 15, as a share of R(15): mean over all that give both ends."""
    slopes = [
        (known[max(known)] / known[15] - 1) / np.log2((max(known) + 1) / 16)
        for setting in settings
        for known in setting.lengths.values()
        if max(known) > 15
    ]
    return float(np.mean(slopes))


def round_lengths(setting: Setting, slope: float) -> np.ndarray:
    """R(0..127), mean over the domains; R(0) = 1."""
    places = np.log2(np.arange(MOST_NODES + 1) + 1)
    curves = []
    for known in setting.lengths.values():
        widths = sorted(known)
        at, values = [0.0, *np.log2(np.array(widths) + 1)], [1.0, *(known[n] for n in widths)]
        last = slope * known[15] if len(widths) == 1 else (values[-1] - values[-2]) / (at[-1] - at[-2])
        curves.append(np.interp(places, at, values) + last * np.maximum(places - at[-1], 0.0))
    return np.mean(curves, axis=0)


def latency(setting: Setting) -> LatencyTable:
    """The product's own table of the published points; draft and host time from the chain, mean over the domains."""
    points = [LatencyPoint(n, 1, CONTEXT, ms) for n, ms in setting.verify.items()]
    rest = np.mean([ms * length for ms, length in setting.chain.values()]) - setting.verify[CHAIN_TOKENS]
    return LatencyTable(points, [DraftPoint(1, CONTEXT, max(float(rest), 1e-3))])


def choose(rule: str, lengths: np.ndarray, table: LatencyTable) -> int:
    """The width that a rule takes for R(0..127) on this table."""
    if rule.startswith("fixed:"):
        return int(rule.partition(":")[2])
    nodes = np.arange(len(lengths))
    cost = table.round_ms(nodes, 1, CONTEXT, drafting=True)
    if rule == "round":
        worse = np.flatnonzero(np.diff(lengths / convex_fit(nodes.astype(np.float64), cost)) <= 0)
        return int(worse[0]) if len(worse) else len(lengths) - 1
    if rule != "joint":
        raise ValueError(f"rule={rule!r}: is not replayed. Use joint, round or fixed:N")
    gains, counts, prices = np.diff(lengths)[None, None], np.array([[len(lengths) - 1]]), np.zeros(1)
    plain = 1.0 / float(table.round_ms([0], 1, CONTEXT, drafting=False)[0])
    rate = max(plain, best_rate(gains, counts, prices, cost, committed=1, start=plain))
    return int(merge(gains, counts, prices, cost, rate).nodes[0])


def replay(setting: Setting, rules: Iterable[str], slope: float) -> list[Outcome]:
    """Every rule's choice, and what it brought."""
    lengths, table = round_lengths(setting, slope), latency(setting)
    swept = sorted(next(iter(setting.gains.values())))
    found = []
    for rule in rules:
        nodes = choose(rule, lengths, table)
        scored = max((n for n in swept if n <= nodes), default=swept[0])
        found.append(Outcome(rule, nodes, scored, _mean_gain(setting, scored)))
    return found


def oracle(setting: Setting) -> tuple[int, float]:
    """The best width of the sweep, averaged over domains."""
    swept = next(iter(setting.gains.values()))
    best = max(swept, key=lambda n: _mean_gain(setting, n))
    return best, _mean_gain(setting, best)


def _mean_gain(setting: Setting, nodes: int) -> float:
    return float(np.mean([swept[nodes] for swept in setting.gains.values()]))


def _rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the paper's tables as CSV")
    settings = read(parser.parse_args().data)
    slope = slope_per_doubling(settings)
    print(f"Beyond N = 15 a doubling of the tree adds {slope:.1%} of R(15).\n")
    print(f"{'setting':20} {'rule':12} {'N*':>4} {'scored':>6} {'gain %':>7} {'oracle':>6} {'gain %':>7} {'gap pp':>7}")
    for setting in settings:
        best, best_gain = oracle(setting)
        for found in replay(setting, ("joint", "round", "fixed:63", "fixed:127"), slope):
            gap = found.gain - best_gain
            print(
                f"{setting.name:20} {found.rule:12} {found.nodes:4} {found.scored:6} {found.gain:7.1f}"
                f" {best:6} {best_gain:7.1f} {gap:7.1f}"
            )


if __name__ == "__main__":
    main()
