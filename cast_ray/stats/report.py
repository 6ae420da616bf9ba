"""The end of a job: one summary, as the dictionary that becomes summary.json and as tables read at a glance."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cast_ray.width.latency import LatencyTable

# Of drafters, the worst first, and how they are told.
_VERDICTS = {
    "rejected": "rejected",
    "doubtful": "doubtful",
    "behind": "behind its record",
    "healthy": "healthy",
    "unknown": "too few drafted rounds for a verdict",
}
_PHASES = ("draft", "verify", "host", "prefill")


@dataclass(frozen=True)
class JobTimes:
    """Wall seconds: from the command to engines that can work, from there to the last file, and all of it."""

    start_s: float
    generate_s: float
    total_s: float


def summarise(
    counts: dict[str, Any],
    actors: dict[str, dict[str, Any]],
    times: JobTimes,
    settings: dict[str, Any],
    timeline: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary. counts: rows, failed, input_tokens, generated_tokens, rounds, error_kinds, finish_reasons and
    first_errors, as read back from the output. actors: `EnginePool.stats()`. timeline: `Timeline.to_dict()`."""
    rounds = counts["rounds"]
    return {
        "rows": counts["rows"],
        "answered": counts["rows"] - counts["failed"],
        "failed": counts["failed"],
        "errors_by_kind": dict(sorted(counts["error_kinds"].items())),
        "first_errors": counts["first_errors"],
        "finish_reasons": dict(sorted(counts["finish_reasons"].items())),
        "input_tokens": counts["input_tokens"],
        "generated_tokens": counts["generated_tokens"],
        "rounds": rounds,
        "mean_round_length": counts["generated_tokens"] / rounds if rounds else None,
        "tokens_per_s": counts["generated_tokens"] / times.generate_s if times.generate_s > 0 else None,
        "seconds": {"start": times.start_s, "generate": times.generate_s, "total": times.total_s},
        "actors": [summarise_actor(about) for about in actors.values()],
        "timeline": timeline or {},
        "settings": settings,
        "versions": versions(),
    }


def summarise_actor(about: dict[str, Any]) -> dict[str, Any]:
    """One actor's part: width and latency in force, shares of its busy time, and the engine's own statistics."""
    engine = about.get("engine")
    if engine is None:
        state, cause = about.get("state", "lost"), about.get("cause", "was still loading")
        return {"name": about["name"], "group": about.get("group"), "state": state, "cause": cause}
    spent = {phase: engine[f"{phase}_ms"] for phase in _PHASES}
    busy = sum(spent.values())
    rows = about.get("rows", {})
    return {
        "name": about["name"],
        "group": about.get("group"),
        "state": "restarted" if about.get("restarted") else "ready",
        "node": about.get("node"),
        "device": engine["device"],
        "requests_finished": engine["requests_finished"],
        "tokens_generated": engine["tokens_generated"],
        "rounds": engine["rounds"],
        "mean_round_length": engine["mean_round_length"],
        "nodes_verified": engine["nodes_verified"],
        "accepted_by_source": engine.get("accepted_by_source", {}),
        "width": engine["width"],
        "verify_ms_at_width": verify_at_width(engine),
        "busy_ms": busy,
        "share": {phase: ms / busy if busy else 0.0 for phase, ms in spent.items()},
        "latency": engine["latency"],
        "drafter": engine.get("drafter"),
        "notes": engine.get("notes", []),
        "drafter_health": engine.get("drafter_health"),
        "preemptions": engine.get("preemptions", 0),
        "prompt_tokens_reused": engine.get("prefix_tokens_reused", 0),
        "round_lengths": rows.get("round_lengths", {}),
        "mean_row_seconds": rows.get("mean_seconds"),
    }


def source_words(actors: list[dict[str, Any]]) -> str | None:
    """Accepted candidates by who proposed them, where that was not a drafter alone."""
    counts: dict[str, int] = {}
    for actor in actors:
        for name, count in (actor.get("accepted_by_source") or {}).items():
            counts[name] = counts.get(name, 0) + count
    if not any(count for name, count in counts.items() if name != "drafter"):
        return None
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def verify_at_width(engine: dict[str, Any]) -> list[dict[str, float]]:
    """For each batch that has a width: nodes N, and predicted ms of a verification with N = 0 and with N."""
    if not engine["latency"]:
        return []
    table = LatencyTable.from_dict(engine["latency"])
    report = engine["width"]
    chosen = report.get("chosen") or []
    if not chosen and report.get("max_nodes") is not None:
        chosen = [{"batch": 1, "context": table.base_context, "nodes": report["max_nodes"]}]
    found = []
    for entry in chosen:
        batch, nodes = entry["batch"], entry["nodes"]
        ms = table.verify_ms([batch, batch * (nodes + 1)], batch, entry["context"])
        found.append(
            {"batch": batch, "context": entry["context"], "nodes": nodes, "ms_root": float(ms[0]), "ms": float(ms[1])}
        )
    return found


def versions() -> dict[str, str]:
    """Versions of what decides the output and the speed."""
    found = {"python": platform.python_version()}
    for package in ("cast_ray", "torch", "transformers", "ray", "pyarrow"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def render(summary: dict[str, Any]) -> RenderableType:
    """The summary for a terminal or a log; made for 120 columns, and folded in less."""
    seconds = summary["seconds"]
    totals = Table(title="Batch generation", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary["errors_by_kind"].items())
    totals.add_row("rows", f"{summary['rows']} ({summary['answered']} answered)")
    totals.add_row("errors", f"{summary['failed']}" + (f" ({kinds})" if kinds else ""))
    totals.add_row("tokens", f"{summary['generated_tokens']} generated, {summary['input_tokens']} read")
    if summary["tokens_per_s"] is not None:
        totals.add_row("speed", f"{summary['tokens_per_s']:.1f} tokens/s")
    totals.add_row("round length", f"{_number(summary['mean_round_length'])} tokens a target pass")
    if (sources := source_words(summary["actors"])) is not None:
        totals.add_row("accepted", sources)
    if (health := drafter_words(summary["actors"])) is not None:
        totals.add_row("drafter", health)
    for note in dict.fromkeys(note for actor in summary["actors"] for note in actor.get("notes", [])):
        totals.add_row("note", note)
    if reused := sum(actor.get("prompt_tokens_reused", 0) for actor in summary["actors"]):
        totals.add_row("prefix cache", f"{reused} prompt tokens reused")
    if preempted := sum(actor.get("preemptions", 0) for actor in summary["actors"]):
        totals.add_row("preemptions", f"{preempted} (the KV cache was full; raise engine.kv_cache_tokens)")
    totals.add_row("time", f"{seconds['total']:.1f} s ({seconds['start']:.1f} s to start)")
    totals.add_row("output", str(summary["settings"].get("output", "")))
    parts: list[RenderableType] = [totals]
    if summary["actors"]:
        parts.append(_actor_table(summary["actors"]))
    if summary["first_errors"]:
        parts.append(Text("First errors", style="bold"))
        parts += [Text(f"  {found['row']}  {found['error']}") for found in summary["first_errors"]]
    return Group(*parts)


def drafter_words(actors: Sequence[Mapping[str, Any]]) -> str | None:
    """What the engines say of their drafters, the worst first; None where there is none."""
    verdicts: Counter[str] = Counter()
    causes: list[str] = []
    for actor in actors:
        health = actor.get("drafter_health")
        # One that had nothing to show is not worth a word, as at width `ar`.
        if health is not None and (health["verdict"] != "unknown" or actor["nodes_verified"]):
            verdicts[health["verdict"]] += 1
            causes += health["likely_causes"]
    if not verdicts:
        return None
    shown = [f"{words}{_times(verdicts[verdict])}" for verdict, words in _VERDICTS.items() if verdicts[verdict]]
    hints = f"; it may be {', or '.join(dict.fromkeys(causes))}" if causes else ""
    return ", ".join(shown) + hints


def _times(count: int) -> str:
    return f" on {count} engines" if count > 1 else ""


def _actor_table(actors: list[dict[str, Any]]) -> Table:
    table = Table(title="Engines", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (
        "engine",
        "device",
        "tokens",
        "round",
        "width",
        "verify ms at N=0 and N",
        "draft verify host prefill",
    ):
        table.add_column(name, justify="left", overflow="fold")  # what does not fit goes on in the next line
    for actor in actors:
        if actor["state"] not in ("ready", "restarted"):
            table.add_row(actor["name"], f"{actor['state']}: {actor['cause']}", "", "", "", "", "")
            continue
        device = actor["device"]
        table.add_row(
            actor["name"] + (" (restarted)" if actor["state"] == "restarted" else ""),
            f"{device['name']} {device['dtype']} x{device['threads']}",
            str(actor["tokens_generated"]),
            _number(actor["mean_round_length"]),
            _width(actor["width"]),
            _latencies(actor),
            " ".join(f"{share:.0%}" for share in actor["share"].values()),
        )
    return table


def _width(report: dict[str, Any]) -> str:
    """N where one is in force for all; else N for the smallest and the largest batch. N* is one that was settled."""
    chosen = sorted(report.get("chosen") or [], key=lambda entry: entry["batch"])
    calibrated = report.get("calibrated", True)
    if not chosen:
        nodes = report.get("max_nodes")
        # None is in force before the first round, and between a change of mind and the next one.
        state = f" (N={nodes})" if nodes is not None else "" if calibrated else " (calibrating)"
        return str(report.get("width", "")) + state
    ends = {entry["batch"]: entry["nodes"] for entry in (chosen[0], chosen[-1])}
    sign, note = ("N*", "") if calibrated else ("N", " (calibrating)")
    if len(set(ends.values())) == 1:
        return f"{sign}={chosen[0]['nodes']}{note}"
    return ", ".join(f"{sign}={nodes} at batch {batch}" for batch, nodes in ends.items()) + note


def _latencies(actor: dict[str, Any]) -> str:
    in_force = actor["verify_ms_at_width"]
    if not in_force:
        if not actor["latency"]:
            return "not measured"
        # Measured, but there is no width in force that it could be told for.
        table = LatencyTable.from_dict(actor["latency"])
        return f"{float(table.verify_ms([1], 1, table.base_context)[0]):.1f} (batch 1)"
    entry = max(in_force, key=lambda found: found["batch"])
    return f"{entry['ms_root']:.1f} and {entry['ms']:.1f} (batch {entry['batch']:.0f})"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
