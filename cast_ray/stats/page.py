"""`report.html`: the summary of a job as one file with plots. No script, no request to anywhere; light and dark.

It draws what is in the summary, and leaves out the plots for which there is nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cast_ray.stats.charts import Points, bars, lines
from cast_ray.stats.counters import add_up
from cast_ray.stats.report import drafter_words

# More lines than this in one plot cannot be told apart.
_MOST_ACTORS = 12

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--dim:#60646c;--grid:#e4e6ea;--card:#f7f8fa;
--c0:#2563c9;--c1:#d9730d;--c2:#25855a;--c3:#9b3fb5;--c4:#b8323c;--c5:#0e8a9c}
@media (prefers-color-scheme:dark){:root{--bg:#16181c;--fg:#e6e8eb;--dim:#9aa0a8;--grid:#30343a;--card:#1e2126;
--c0:#6ea8ff;--c1:#f2a65a;--c2:#6cc79a;--c3:#cf8be0;--c4:#f07f86;--c5:#5cc8d8}}
body{margin:0 auto;padding:24px;max-width:1240px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}h3{font-size:14px;margin:0 0 6px}
p{color:var(--dim);margin:0 0 12px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--dim);font-weight:500}.wide{overflow-x:auto}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px}
figure{margin:0;padding:14px;background:var(--card);border-radius:8px}svg{width:100%;height:auto;display:block}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;color:var(--dim)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:14px}
.tiles div{background:var(--card);border-radius:8px;padding:10px 14px}.tiles b{display:block;font-size:20px}
pre{background:var(--card);padding:12px;border-radius:8px;overflow-x:auto;font-size:13px}
"""


def render_html(summary: Mapping[str, Any]) -> str:
    """The whole page. summary: as `report.summarise` makes it, and as it stands in summary.json."""
    plots = "".join(
        f"<figure><h3>{escape(title)}</h3>{drawing}</figure>" for title, drawing in _plots(summary) if drawing
    )
    seconds = summary["seconds"]
    about = json.dumps({"settings": summary["settings"], "versions": summary["versions"]}, indent=2, default=str)
    output = summary["settings"].get("output") or ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Batch generation: {escape(str(output))}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Batch generation</h1><p>{escape(str(output))}</p>"
        f"{_tiles(summary)}"
        f"<h2>Course and shape</h2><div class='plots'>{plots}</div>"
        f"<h2>Engines</h2><div class='wide'>{_engines(summary['actors'])}</div>"
        f"{_errors(summary)}"
        f"<h2>Settings</h2><p>{seconds['start']:.1f} s to start, {seconds['generate']:.1f} s to generate.</p>"
        f"<pre>{escape(about)}</pre></body></html>\n"
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    rate, length = summary["tokens_per_s"], summary["mean_round_length"]
    tiles = {
        "rows answered": f"{summary['answered']:,} of {summary['rows']:,}",
        "errors": f"{summary['failed']:,}",
        "tokens generated": f"{summary['generated_tokens']:,}",
        "tokens a second": "-" if rate is None else f"{rate:,.1f}",
        "tokens a round": "-" if length is None else f"{length:.2f}",
        "seconds": f"{summary['seconds']['total']:,.1f}",
    }
    return (
        "<div class='tiles'>" + "".join(f"<div><b>{value}</b>{name}</div>" for name, value in tiles.items()) + "</div>"
    )


def _plots(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    actors = [actor for actor in summary["actors"] if actor["state"] in ("ready", "restarted")]
    course = summary.get("timeline") or {}
    times = course.get("seconds", [])
    return [
        (
            "Throughput",
            lines({"all": _series(times, course.get("tokens_per_s", []))}, "seconds", "tokens a second"),
        ),
        (
            "Throughput of each engine",
            lines(_each(times, course.get("actor_tokens_per_s", {})), "seconds", "tokens a second"),
        ),
        (
            "Round length over time",
            lines({"all": _series(times, course.get("round_length", []))}, "seconds", "tokens a round"),
        ),
        ("Width over time", lines(_each(times, course.get("width", {})), "seconds", "candidates a round")),
        (
            "Rows by mean round length",
            bars({"rows": add_up(actor.get("round_lengths", {}) for actor in actors)}, "tokens a round", "rows"),
        ),
        ("Predicted and achieved round length", bars(_promises(actors), "engine", "tokens a round")),
        ("Acceptance by depth", bars(_depths(actors), "depth", "candidates")),
        ("Verification time", lines(_latencies(actors), "tokens of a forward", "ms")),
        ("Latency of a row", bars(_row_seconds(actors), "engine", "seconds")),
        ("Errors", bars({"rows": summary["errors_by_kind"]}, "kind", "rows")),
    ]


def _series(times: Sequence[float], values: Sequence[float | None]) -> Points:
    return [(time, value) for time, value in zip(times, values, strict=False) if value is not None]


def _each(times: Sequence[float], values: Mapping[str, Sequence[float | None]]) -> dict[str, Points]:
    return {name: _series(times, found) for name, found in list(values.items())[:_MOST_ACTORS]}


def reliability_of(width: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a width policy's report that tells of promises kept; empty where it has none."""
    inner = width.get("reliability")
    return inner if isinstance(inner, Mapping) else width


def _promises(actors: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {"predicted": {}, "achieved": {}}
    for actor in actors[:_MOST_ACTORS]:
        about = reliability_of(actor["width"])
        if about.get("predicted_round_length") is not None and about.get("achieved_round_length") is not None:
            found["predicted"][actor["name"]] = about["predicted_round_length"]
            found["achieved"][actor["name"]] = about["achieved_round_length"]
    return found


def _depths(actors: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Sums over all engines: prefix mass that the drafter promised at each depth, and candidates accepted there."""
    found: dict[str, dict[str, float]] = {"promised": {}, "accepted": {}}
    for actor in actors:
        for entry in reliability_of(actor["width"]).get("by_depth") or []:
            for name, sums in found.items():
                label = str(entry["depth"])
                sums[label] = sums.get(label, 0.0) + float(entry[name])
    return found


def _latencies(actors: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """The measured curve of each engine at the smallest batch and context it was measured at."""
    found: dict[str, Points] = {}
    for actor in actors[:_MOST_ACTORS]:
        points = (actor.get("latency") or {}).get("verify") or []
        if points:
            first = min((point["batch"], point["context"]) for point in points)
            found[actor["name"]] = sorted(
                (point["tokens"], point["ms"]) for point in points if (point["batch"], point["context"]) == first
            )
    return found


def _row_seconds(actors: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    means = {actor["name"]: actor["mean_row_seconds"] for actor in actors if actor.get("mean_row_seconds")}
    return {"mean": dict(list(means.items())[:_MOST_ACTORS])}


def _engines(actors: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "engine",
        "state",
        "device",
        "rows",
        "tokens",
        "tokens a round",
        "mean width",
        "draft / verify / host / prefill",
        "drafter",
        "prompt tokens reused",
        "preemptions",
    )
    rows = []
    for actor in actors:
        if actor["state"] not in ("ready", "restarted"):
            rows.append((actor["name"], f"{actor['state']}: {actor['cause']}", *[""] * (len(head) - 2)))
            continue
        device = actor["device"]
        width = actor["nodes_verified"] / actor["rounds"] if actor["rounds"] else None
        rows.append(
            (
                actor["name"],
                actor["state"],
                f"{device['name']} {device['dtype']} x{device['threads']}",
                f"{actor['requests_finished']:,}",
                f"{actor['tokens_generated']:,}",
                f"{actor['mean_round_length']:.2f}",
                "-" if width is None else f"{width:.1f}",
                " / ".join(f"{share:.0%}" for share in actor["share"].values()),
                drafter_words([actor]) or "-",
                f"{actor['prompt_tokens_reused']:,}",
                f"{actor['preemptions']:,}",
            )
        )
    return _table(head, rows)


def _errors(summary: Mapping[str, Any]) -> str:
    if not summary["first_errors"]:
        return ""
    rows = [(str(found["row"]), str(found["error"])) for found in summary["first_errors"]]
    return f"<h2>First errors</h2><div class='wide'>{_table(('row', 'error'), rows)}</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
