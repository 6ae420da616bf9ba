"""`cast-ray calibrate`: measure this device for a pair, show what was measured, and save it for engines to come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.commands.prompts import load_prompts
from cast_ray.config import EngineConfig
from cast_ray.settings import load_settings

# Sample prompts and tokens of each that show what the drafter brings.
TRIALS, TRIAL_TOKENS = 8, 32


def calibrate(
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    threads: Annotated[int | None, option(EngineConfig, "threads")] = None,
    max_batch_size: Annotated[int | None, option(EngineConfig, "max_batch_size")] = None,
    max_nodes: Annotated[int | None, option(EngineConfig, "max_nodes")] = None,
    probe_seconds: Annotated[float | None, option(EngineConfig, "probe_seconds")] = None,
    profile_dir: Annotated[Path | None, option(EngineConfig, "profile_dir")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL prompts for the chosen width (default: the package's samples).")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw latency and chosen width into this file as well.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even where a profile is saved.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Measure how long this device takes to verify trees, and show the width that pays best at each batch.

    Engines measure by themselves at their first start; this does it ahead, and shows it. The profile is kept for
    engines with the same device, models, settings and library versions.

    Examples:

      cast-ray calibrate

      cast-ray calibrate --target my/model --drafter my/drafter --png latency.png

      ray job submit --working-dir . -- python jobs/calibrate.py --again
    """
    said = {
        "target": target,
        "drafter": drafter,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "max_batch_size": max_batch_size,
        "max_nodes": max_nodes,
        "probe_seconds": probe_seconds,
        "profile_dir": profile_dir,
    }
    settings = load_settings(EngineConfig, config, {**said, "width": "deployment"})

    from cast_ray.stats.plots import require_matplotlib  # these load torch, which --help need not

    if png is not None:
        require_matplotlib()
    from rich.console import Console

    from cast_ray.stats.calibrate import calibrated, chosen_widths
    from cast_ray.stats.surface import points_table, surface

    console = Console()
    engine, profile, table = calibrated(settings, again=again)
    console.print(points_table(table))
    trials = [item.prompt for item in load_prompts(prompts, TRIALS)][:TRIALS]
    chosen = chosen_widths(engine, table, trials, TRIAL_TOKENS)
    console.print(surface(table, settings.max_nodes, chosen))
    console.print(f"profile   {profile}", soft_wrap=True)
    if png is not None:
        from cast_ray.stats.plots import plot_latency

        console.print(f"picture   {plot_latency(table, settings.max_nodes, chosen, png)}", soft_wrap=True)
