"""Pictures of latency and sweeps as PNG files, with matplotlib (extra `report`). The numbers come from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cast_ray.errors import ConfigError, describe
from cast_ray.stats.surface import batches_of
from cast_ray.width.latency import LatencyTable

if TYPE_CHECKING:
    from cast_ray.stats.sweep_table import SweepTable


def require_matplotlib() -> Any:
    """matplotlib, drawing to files. ConfigError where it is missing: asked for before anything is measured."""
    try:
        import matplotlib
    except ImportError:
        remedy = "pip install 'cast_ray[report]', or leave the option out"
        raise ConfigError(describe("png", True, "needs matplotlib, which is not installed", remedy)) from None
    matplotlib.use("agg")
    return matplotlib


def plot_latency(table: LatencyTable, max_nodes: int, chosen: Mapping[int, int], path: Path) -> Path:
    """Measured forwards with their noise, and rounds as a surface over nodes and batch with the chosen width on it."""
    figure, (left, right) = _figure(2)
    for batch in batches_of(table):
        points = sorted((p for p in table.verify if (p.batch, p.context) == (batch, table.base_context)), key=_tokens)
        if points:
            x, y, noise = zip(*((p.tokens, p.ms, p.noise_ms) for p in points), strict=True)
            left.errorbar(x, y, noise, marker="o", markersize=3, capsize=2, label=f"batch {batch}")
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set_xlabel("packed tokens")
    left.set_ylabel("ms a target forward")
    left.legend(fontsize="small")

    batches, nodes = batches_of(table), np.arange(max_nodes + 1)
    drafting = bool(table.draft)
    ms = np.stack([table.round_ms(nodes, batch, table.base_context, drafting=drafting) for batch in batches])
    rows = np.arange(len(batches))
    mesh = right.pcolormesh(nodes, rows, np.log10(ms), shading="nearest", cmap="viridis")
    colours = figure.colorbar(mesh, ax=right, label="ms a round")
    ticks = colours.get_ticks()
    colours.set_ticks(ticks, labels=[f"{10**tick:.0f}" for tick in ticks])
    marked = [(chosen[batch], row) for row, batch in enumerate(batches) if batch in chosen]
    if marked:
        right.plot(*zip(*marked, strict=True), "wD-", markeredgecolor="black", label="chosen width")
        right.legend(fontsize="small")
    right.set_yticks(rows, [str(batch) for batch in batches])
    right.set_xlabel("nodes a request")
    right.set_ylabel("batch")
    return _save(figure, path)


def plot_sweep(table: SweepTable, path: Path) -> Path:
    """Gain over the chain by width with its interval, the rules' own gains; predicted round ms and round length."""
    from cast_ray.stats.sweep_table import width_of

    sweep = table.sweep
    figure, (left, right) = _figure(2)
    for domain in table.domains:
        rows = [row for row in table.methods() if row.domain == domain]
        fixed = sorted((width, row) for row in rows if (width := width_of(row.method)) is not None)
        x = [width for width, _ in fixed]
        gain = np.array([row.gain.value for _, row in fixed])
        around = np.array([[row.gain.value - row.gain.low, row.gain.high - row.gain.value] for _, row in fixed]).T
        line = left.errorbar(x, gain, np.maximum(around, 0), marker="o", markersize=3, capsize=2, label=domain)
        joint = next(row for row in rows if row.method == "joint")
        left.axhline(joint.gain.value, linestyle="--", linewidth=1, color=line[0].get_color())
    left.axvline(sweep.prediction.width, color="grey", linewidth=1, label=f"predicted N*={sweep.prediction.width}")
    left.set_xlabel("nodes (dashed: joint)")
    left.set_ylabel("gain over the chain, %")
    left.legend(fontsize="small")

    nodes = np.arange(len(sweep.prediction.round_ms))
    right.plot(nodes, sweep.prediction.round_ms, color="tab:red", label="predicted ms a round")
    right.set_ylim(bottom=0)
    right.set_xlabel("nodes")
    right.set_ylabel("ms a round")
    lengths = right.twinx()
    lengths.plot(nodes, sweep.prediction.round_length, color="tab:blue", label="expected R")
    measured = sorted((w, r.round_length) for r in table.methods() if r.domain == "all" and (w := width_of(r.method)))
    if measured:
        lengths.plot(*zip(*measured, strict=True), "o", color="tab:blue", markersize=3, label="measured R")
    lengths.set_ylabel("round length")
    lengths.legend(fontsize="small", loc="lower right")
    right.legend(fontsize="small", loc="upper left")
    return _save(figure, path)


def _tokens(point: Any) -> int:
    return int(point.tokens)


def _figure(panels: int) -> tuple[Any, Any]:
    require_matplotlib()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 4), layout="constrained")
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
