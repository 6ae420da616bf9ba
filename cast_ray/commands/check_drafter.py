"""`cast-ray check-drafter`: whether a drafter and a target belong together. `stats.pair_check` finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.commands.prompts import load_prompts
from cast_ray.config import EngineConfig
from cast_ray.settings import load_settings


def check_drafter(
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of messages or prompt (default: the package's samples).")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to decode.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 48,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    threads: Annotated[int | None, option(EngineConfig, "threads")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Decode some prompts with a pair, and say whether the drafter does what it should.

    Shows what it promises and what the target accepts, by depth, and whether the next layers, positions or another mask
    token do better: then its config.json is wrong. Exits with 2 where the pair cannot work at all.

    Examples:

      cast-ray check-drafter

      cast-ray check-drafter --target my/model --drafter my/drafter --prompts mine.jsonl
    """
    said = {"target": target, "drafter": drafter, "dtype": dtype, "device": device, "threads": threads}
    settings = load_settings(EngineConfig, config, {**said, "max_batch_size": min(count, 16)})
    chosen = [item.prompt for item in load_prompts(prompts, count)][:count]

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from cast_ray.stats.pair_check import check_pair_by_decoding  # loads torch, which --help need not

    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        found = check_pair_by_decoding(
            settings,
            chosen,
            max_tokens,
            lambda name, done, total: progress.update(task, description=name, completed=done, total=total),
        )
    depths = Table("depth", "promised", "accepted", box=None, title=f"The chain in {found.own.rounds} rounds")
    for depth, (promised, accepted) in enumerate(zip(found.own.predicted, found.own.accepted, strict=True), 1):
        depths.add_row(str(depth), f"{promised:.3f}", f"{accepted:.3f}")
    readings = Table("read as", "round length", "promised", box=None)
    for variation, result in found.tried:
        readings.add_row(variation.name, f"{result.round_length:.2f} ±{result.error:.2f}", f"{result.promised:.2f}")
    places = Table("context", "on what follows", "difference", box=None, title="The same roots at other positions")
    for shift in found.shifts:
        gain = f"{shift.shifted - shift.own:+.3f} ±{shift.error:.3f}"
        places.add_row(f"positions {shift.shift:+d}", f"{shift.shifted:.3f} against {shift.own:.3f}", gain)
    console.print(depths, "", readings, "", places, "", *found.verdict(), sep="\n")
