"""`cast-ray check-drafter`: whether a drafter and a target belong together. `stats.pair_check` finds out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.commands.prompts import load_prompts
from cast_ray.config import EngineConfig
from cast_ray.settings import load_settings

if TYPE_CHECKING:
    from cast_ray.request import Prompt


def check_drafter(
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of messages or prompt (default: the package's samples).")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to decode; with --record, of each domain.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 48,
    record: Annotated[
        bool, typer.Option("--record", help="Write the acceptance on these prompts into the drafter's config.json.")
    ] = False,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    threads: Annotated[int | None, option(EngineConfig, "threads")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Decode some prompts with a pair, and say whether the drafter does what it should.

    Shows what it promises and what the target accepts, by depth, and whether the next layers, positions or another mask
    token do better: then its config.json is wrong. Exits with 2 where the pair cannot work at all.

    With --record it measures instead what is accepted by depth and mass, greedy and at temperature 1, and writes it
    into the drafter's config.json: engines start from it, and say when a drafter falls behind it. Give prompts that the
    drafter was not trained on, some for each kind of work.

    Examples:

      cast-ray check-drafter

      cast-ray check-drafter --target my/model --drafter my/drafter --prompts mine.jsonl

      cast-ray check-drafter --drafter my/drafter --target my/model --prompts unseen.jsonl --count 40 --record
    """
    said = {"target": target, "drafter": drafter, "dtype": dtype, "device": device, "threads": threads}
    settings = load_settings(EngineConfig, config, {**said, "max_batch_size": min(count, 16)})
    items = load_prompts(prompts, count)
    if record:
        _record(settings, [item.prompt for item in items], max_tokens)
        return
    chosen = [item.prompt for item in items][:count]

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


def _record(settings: EngineConfig, prompts: list[Prompt], max_tokens: int) -> None:
    """Measure and write; show what was written."""
    from rich.console import Console
    from rich.table import Table

    from cast_ray.stats.drafter_record import record_acceptance  # loads torch, which --help need not

    console = Console()
    path, found = record_acceptance(settings, prompts, max_tokens, lambda name, done, total: console.print(name))
    for part in found.to_dict()["by_temperature"]:
        warmth = part["temperature_up_to"]
        title = f"{part['rounds']} rounds of {found.nodes} nodes, " + ("greedy" if warmth == 0 else f"T <= {warmth:g}")
        table = Table("depth", "promised", "accepted", box=None, title=title)
        for row in part["by_depth"]:
            table.add_row(str(row["depth"]), f"{row['promised']:.3f}", f"{row['accepted']:.3f}")
        console.print(table, "")
    console.print(f"written   {path}", soft_wrap=True)
