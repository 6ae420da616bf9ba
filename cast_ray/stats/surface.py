"""A latency table drawn: ms of a round over nodes and batch, and the width that a rule chooses on it, for the terminal.

Pictures as files are `plots`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.color import Color
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from cast_ray.width.latency import LatencyTable

# From a fast round to a slow one.
COOL, WARM = (20, 60, 110), (170, 50, 30)


def batches_of(table: LatencyTable) -> list[int]:
    """The batches that were measured."""
    return sorted({point.batch for point in table.verify})


def widths_of(max_nodes: int) -> list[int]:
    """Widths worth a row: 0, then one less than powers of two, and the widest."""
    return sorted({0, *(2**power - 1 for power in range(1, 11) if 2**power - 1 < max_nodes), max_nodes})


def points_table(table: LatencyTable) -> RenderableType:
    """Every measured point, as it was measured."""
    verify = Table("batch", "context", "packed tokens", "ms", "noise", box=None, title="Target forward")
    for point in sorted(table.verify, key=lambda p: (p.batch, p.context, p.tokens)):
        where = str(point.batch), str(point.context), str(point.tokens)
        verify.add_row(*where, f"{point.ms:.2f}", f"±{point.noise_ms:.2f}")
    draft = Table("batch", "context", "ms", "noise", box=None, title="Drafter forward")
    for drafted in sorted(table.draft, key=lambda p: (p.batch, p.context)):
        draft.add_row(str(drafted.batch), str(drafted.context), f"{drafted.ms:.2f}", f"±{drafted.noise_ms:.2f}")
    return Group(verify, Text(), draft, Text(f"\nHost: {table.host_ms:.2f} ms a round"))


def surface(table: LatencyTable, max_nodes: int, chosen: Mapping[int, int]) -> RenderableType:
    """Whole rounds: a row for each width, a column for each batch, colder is faster.

    chosen: the width in force by batch, marked; widths that are no row of their own get one.
    """
    batches, context = batches_of(table), table.base_context
    widths = sorted({*widths_of(max_nodes), *chosen.values()})
    ms = {
        batch: [float(table.round_ms([n], batch, context, drafting=n > 0 and bool(table.draft))[0]) for n in widths]
        for batch in batches
    }
    logs = np.log([value for column in ms.values() for value in column])
    drawn = Table(box=None, padding=0, title=f"ms a round at context {context}, nodes a request down, batch across")
    drawn.add_column("nodes", justify="right")
    for batch in batches:
        drawn.add_column(str(batch), justify="right")
    for row, nodes in enumerate(widths):
        cells = [_cell(ms[batch][row], logs.min(), logs.max(), chosen.get(batch) == nodes) for batch in batches]
        drawn.add_row(f"{nodes} ", *cells)
    return Group(drawn, Text("◆ the width that pays best"))


def _cell(ms: float, low: float, high: float, chosen: bool) -> Text:
    share = (np.log(ms) - low) / max(high - low, 1e-9)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(COOL, WARM, strict=True))
    style = Style(color="white", bgcolor=Color.from_rgb(red, green, blue).name, bold=chosen)
    return Text(f" {'◆' if chosen else ' '}{ms:8.1f} ", style=style)
