"""`cast-ray sweep`: every width on one's own prompts, and how close the rules came. `stats.sweep` measures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.commands.prompts import load_prompts
from cast_ray.config import EngineConfig
from cast_ray.errors import ConfigError, describe
from cast_ray.settings import load_settings

DEFAULT_WIDTHS = "0,3,7,11,15,23,31,47,63,95,127"

# Columns of the tables where there is no terminal to ask.
LOG_WIDTH = 120


def sweep(
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of messages or prompt, and domain (default: the package's samples).")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each domain.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    widths: Annotated[str, typer.Option(help="Nodes to try, with commas; 0 is plain decoding.")] = DEFAULT_WIDTHS,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is measured; medians count.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Stop after so long; the same command goes on where it was.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the CSV files and the plot.")] = Path("sweep-output"),
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    threads: Annotated[int | None, option(EngineConfig, "threads")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Measure every width, and compare the one that was predicted, and `joint`, with the best.

    Methods take turns on each prompt, so that a busy machine is busy for all of them. Intervals are the bootstrap's
    over prompts, 95%. Decoding alone is timed, reading the prompt is not.

    Every run is written down as it ends. A sweep that was stopped, by --minutes or otherwise, goes on when the same
    command is given again.

    Examples:

      cast-ray sweep --count 3 --max-tokens 64

      cast-ray sweep --prompts mine.jsonl --widths 0,7,15,31,63 --batch 4 --output my-sweep

      cast-ray sweep --minutes 8    # again and again, until the tables are there
    """
    said = {"target": target, "drafter": drafter, "dtype": dtype, "device": device, "threads": threads}
    settings = load_settings(EngineConfig, config, said)
    items = load_prompts(prompts, count)
    nodes = _numbers(widths)

    from rich.console import Console
    from rich.progress import Progress

    from cast_ray.engine.engine import Engine  # these load torch, which --help need not
    from cast_ray.request import SamplingParams
    from cast_ray.stats.sweep import Item, run_sweep, sweep_config
    from cast_ray.stats.sweep_log import SweepLog
    from cast_ray.stats.sweep_table import SweepTable, render, write_csv
    from cast_ray.training.progress import step_report

    console = Console()
    # In a log tables are not squeezed into the 80 columns that are assumed there, and a bar would not be seen.
    console = console if console.is_terminal else Console(width=LOG_WIDTH)
    line = None if console.is_terminal else step_report(Console(stderr=True))
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True)
    asked = {**said, "max_tokens": max_tokens, "temperature": temperature, "widths": nodes, "batch": batch}
    log = SweepLog(output, {**asked, "repeats": repeats, "prompts": [[item.domain, item.prompt] for item in items]})
    began = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring this device", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, description="sweeping", completed=done, total=total)
            if line is not None:
                line("sweeping", done, total)

        engine = Engine(sweep_config(settings, nodes, batch))
        measured = run_sweep(
            engine,
            [Item(item.prompt, item.domain) for item in items],
            nodes,
            params,
            batch=batch,
            repeats=repeats,
            report=show,
            log=log,
            # Loading and measuring the device are a part of the time.
            seconds=None if minutes is None else 60 * minutes - (time.monotonic() - began),
        )
    if measured is None:
        console.print(f"{len(log.runs)} runs are in {log.path}: the same command goes on", soft_wrap=True)
        return
    table = SweepTable(measured)
    console.print(render(table))
    written = [str(path) for path in write_csv(table, output)]
    try:
        from cast_ray.stats.plots import plot_sweep

        written.append(str(plot_sweep(table, output / "sweep.png")))
    except ConfigError as error:  # the numbers are there all the same
        console.print(f"no plot: {error}")
    log.finish()
    console.print(f"written   {', '.join(written)}", soft_wrap=True)


def _numbers(text: str) -> list[int]:
    try:
        nodes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        nodes = []
    if not nodes or nodes[0] < 0 or nodes[-1] < 1:
        problem = "is no list of numbers of nodes with one above 0"
        raise ConfigError(describe("widths", text, problem, f"Write {DEFAULT_WIDTHS}"))
    return nodes
