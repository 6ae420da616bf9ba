"""`cast-ray doctor`: what this machine has, what an engine would use of it and why, and what to install for more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cast_ray.commands.options import option
from cast_ray.config import EngineConfig
from cast_ray.settings import load_settings

if TYPE_CHECKING:
    from cast_ray.stats.doctor import Findings

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


def doctor(
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    attention: Annotated[str | None, option(EngineConfig, "attention")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Show what this machine has, what engines will use of it and why, and what could be had with which command.

    Loads no model and starts nothing. Exits with 0 whatever it finds.

    Examples:

      cast-ray doctor

      cast-ray doctor --json

      cast-ray doctor --device cuda --attention flashinfer
    """
    settings = load_settings(EngineConfig, config, {"device": device, "dtype": dtype, "attention": attention})

    from cast_ray.stats.doctor import examine  # loads torch, which --help need not

    findings = examine(settings)
    if as_json:
        print(json.dumps(findings.to_dict(), indent=1))
    else:
        show(findings)


def show(findings: Findings, console: Any = None) -> None:
    """Print findings as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cast_ray.models.fit import gigabytes

    console = console or Console()

    def table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
        grid = Table(title=title, title_justify="left", box=None, show_header=False)
        grid.add_column(style="bold", no_wrap=True)
        for row in rows:
            grid.add_row(*row)
        console.print(grid)

    has = findings.machine
    free, total = has["memory_free"] or 0, has["memory"] or 0
    about = [
        ("system", escape(has["system"])),
        ("cpu", f"{escape(has['cpu'])}, {has['threads']} PyTorch threads"),
        ("memory", f"{gigabytes(total)}, {gigabytes(free)} free"),
    ]
    for number, gpu in enumerate(has["gpus"]):
        room = f"{gigabytes(gpu['memory'])}, {gigabytes(gpu['memory_free'])} free"
        about.append((f"gpu {number}", f"{escape(gpu['name'])}, compute capability {gpu['capability']}, {room}"))
    if not has["gpus"]:
        about.append(("gpu", "none"))
    known = [f"{name} {version}" for name, version in findings.versions.items() if version]
    lacking = [name for name, version in findings.versions.items() if not version]
    about.append(("versions", escape(", ".join(known) + (f"; without {', '.join(lacking)}" if lacking else ""))))
    table("This machine", about)
    table("Engines use", [(name, escape(f"{use.value} ({use.why})")) for name, use in findings.uses.items()])
    rows = []
    for check in findings.checks:
        says = escape(check.says) + (f"\n[bold]{escape(check.remedy)}[/]" if check.remedy else "")
        rows.append((check.name, MARKS[check.state], says))
    table("Checks", rows)
