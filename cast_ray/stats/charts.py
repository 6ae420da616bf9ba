"""Charts as SVG text, drawn by hand: lines, bars and steps that follow the page's light or dark colours.

They need no library, no script and no network. A chart of nothing is an empty string.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 44
_COLOURS = 6  # as many `--c0`, `--c1`, … as the page has

Points = Sequence[tuple[float, float]]


def lines(series: Mapping[str, Points], x_label: str, y_label: str, *, dashed: frozenset[str] = frozenset()) -> str:
    """A line for each named series of (x, y); the y axis begins at 0. Points that are no number break nothing."""
    kept = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()
    }
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points]
    frame = _Frame(min(xs), max(xs), max(ys))
    parts = [frame.axes(x_label, y_label)]
    for number, (name, points) in enumerate(kept.items()):
        colour = f"var(--c{number % _COLOURS})"
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if name in dashed else ""
        if len(points) == 1:
            parts.append(
                f'<circle cx="{frame.x(points[0][0]):.1f}" cy="{frame.y(points[0][1]):.1f}" r="3" fill="{colour}"/>'
            )
        else:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}>'
                f"<title>{escape(name)}</title></polyline>"
            )
    return _svg(parts, list(kept) if len(kept) > 1 else [])


def bars(groups: Mapping[str, Mapping[str, float]], x_label: str, y_label: str) -> str:
    """Bars side by side: for each label on the x axis one bar of every named series.

    groups: series -> label -> value.
    """
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    top = max((value for values in groups.values() for value in values.values()), default=0.0)
    if not labels or top <= 0:
        return ""
    frame = _Frame(0.0, float(len(labels)), top)
    parts = [frame.axes(x_label, y_label, ticks=False)]
    slot = (frame.x(1.0) - frame.x(0.0)) * 0.8
    width = min(slot / len(groups), 60.0)
    every = math.ceil(len(labels) / 16)
    for place, label in enumerate(labels):
        middle = frame.x(place + 0.5)
        if place % every == 0:
            parts.append(_text(middle, HEIGHT - _BOTTOM + 15, label, "middle"))
        for number, (name, values) in enumerate(groups.items()):
            value = values.get(label, 0.0)
            left = middle + (number - len(groups) / 2) * width
            y = frame.y(value)
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(1.0, width - 1):.1f}" '
                f'height="{HEIGHT - _BOTTOM - y:.1f}" fill="var(--c{number % _COLOURS})">'
                f"<title>{escape(name)}: {escape(label)}: {value:g}</title></rect>"
            )
    return _svg(parts, list(groups) if len(groups) > 1 else [])


class _Frame:
    """Where values lie in the drawing."""

    def __init__(self, low: float, high: float, top: float) -> None:
        self.low = low
        self.high = high if high > low else low + 1.0
        self.step = _nice(top / 4 if top > 0 else 0.25)
        self.top = self.step * max(1, math.ceil(top / self.step - 1e-9))

    def x(self, value: float) -> float:
        return _LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / self.top * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str, y_label: str, ticks: bool = True) -> str:
        parts = []
        for number in range(round(self.top / self.step) + 1):
            value = number * self.step
            y = self.y(value)
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>')
            parts.append(_text(_LEFT - 6, y + 4, _short(value), "end"))
        if ticks:
            step = _nice((self.high - self.low) / 6)
            value = math.ceil(self.low / step - 1e-9) * step
            while value <= self.high + 1e-9:
                parts.append(_text(self.x(value), HEIGHT - _BOTTOM + 15, _short(value), "middle"))
                value += step
        middle = (HEIGHT - _BOTTOM + _TOP) / 2
        parts.append(_text((WIDTH + _LEFT) / 2, HEIGHT - 12, x_label, "middle"))
        turned = f'x="12" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 12 {middle:.0f})"'
        parts.append(f"<text {turned}>{escape(y_label)}</text>")
        return "".join(parts)


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, … that is not less."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _short(value: float) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (size if sign != 'k' else 1e3):g}{sign}"
    return f"{value:g}" if abs(value) < 1e-9 or abs(value) >= 1e-3 else f"{value:.0e}"


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Sequence[str], legend: Sequence[str]) -> str:
    """The drawing, with a legend under it that folds as text does."""
    marks = "".join(
        f'<span><i style="background:var(--c{number % _COLOURS})"></i>{escape(name)}</span>'
        for number, name in enumerate(legend)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
        + (f'<div class="legend">{marks}</div>' if marks else "")
    )
