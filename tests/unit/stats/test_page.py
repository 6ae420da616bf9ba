"""report.html stands by itself: sound markup, every plot for which there is data, nothing fetched, nothing run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

from cast_ray.stats.charts import bars, lines
from cast_ray.stats.page import render_html
from cast_ray.stats.report import JobTimes, summarise
from cast_ray.stats.timeline import Timeline
from tests.fake_engine import fake_stats

VOID = {"meta", "br", "img"}


class Checker(HTMLParser):
    """Fails on tags that do not close in order; SVG's own empty tags count as closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def summary(seconds: int = 20, **changes: Any) -> dict[str, Any]:
    timeline = Timeline()
    stats: dict[str, dict[str, Any]] = {}
    for second in range(seconds):
        for name in ("fast-0", "slow-0"):
            rows = {"round_lengths": {"1.5": second, "2": 3}, "mean_seconds": 0.5}
            stats[name] = {"name": name, "group": name[:-2], "engine": fake_stats(second, 40 * second), "rows": rows}
        timeline.add(float(second), second, stats)
    stats["gone-0"] = {"name": "gone-0", "engine": None, "cause": "RayActorError: <out of memory>"}
    counts = {
        "rows": 100,
        "failed": 2,
        "input_tokens": 500,
        "generated_tokens": 1600,
        "rounds": 800,
        "error_kinds": {"RequestError": 2},
        "finish_reasons": {"stop": 98},
        "first_errors": [{"row": "7", "error": "RequestError: <script>alert(1)</script>"}],
        **changes,
    }
    return summarise(counts, stats, JobTimes(1, 20, 21), {"output": "answers & more"}, timeline.to_dict())


def check(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not [name for name, _ in checker.attributes if name in ("src", "href") or name.startswith("on")]
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_the_page_has_every_plot_and_fetches_nothing() -> None:
    page = render_html(summary())
    check(page)
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert titles == [
        "Throughput",
        "Throughput of each engine",
        "Round length over time",
        "Width over time",
        "Rows by mean round length",
        "Predicted and achieved round length",
        "Acceptance by depth",
        "Verification time",
        "Latency of a row",
        "Errors",
    ]
    assert page.count("<svg") == len(titles)
    assert "prefers-color-scheme:dark" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "lost: RayActorError: &lt;out of memory&gt;" in page


def test_a_job_of_nothing_has_a_page_without_empty_plots() -> None:
    nothing = {"rows": 0, "failed": 0, "generated_tokens": 0, "rounds": 0, "error_kinds": {}, "first_errors": []}
    page = render_html(summary(seconds=0, **nothing))
    check(page)
    assert page.count("<svg") == page.count("<h3>") == 0


def test_points_of_a_line_lie_where_their_values_say() -> None:
    drawing = lines({"a": [(0, 0), (5, 50), (10, 100)]}, "x", "y")
    (points,) = re.findall('points="(.*?)"', drawing)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points.split())
    assert x1 - x0 == x2 - x1 > 0
    assert y0 - y1 == y1 - y2 > 0


def test_bars_are_as_high_as_their_values() -> None:
    drawing = bars({"rows": {"a": 10, "b": 20, "c": 0}}, "kind", "rows")
    heights = [float(height) for height in re.findall('height="([0-9.]+)"', drawing)]
    assert heights[1] == 2 * heights[0] > 0
    assert heights[2] == 0
