"""`cast-ray check`: whether a target decodes the same at every width and batch. `stats.check` finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.commands.prompts import load_prompts
from cast_ray.config import EngineConfig
from cast_ray.settings import load_settings

EXIT_DIFFERENT = 1


def check(
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of messages or prompt (default: the package's samples).")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to decode.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 48,
    widths: Annotated[str, typer.Option(help="Width policies, with commas between.")] = "chain,fixed:15,fixed:63",
    batches: Annotated[str, typer.Option(help="Requests decoded together, with commas between.")] = "1,8",
    temperature: Annotated[float, typer.Option(min=1e-4, help="Of the sampled outputs.")] = 0.8,
    seeds: Annotated[int, typer.Option(min=0, help="Seeds to sample with; 0 for greedy alone.")] = 2,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    device: Annotated[str | None, option(EngineConfig, "device")] = None,
    threads: Annotated[int | None, option(EngineConfig, "threads")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of engine settings; flags win over it.")] = None,
) -> None:
    """Compare what the engine decodes with plain decoding and with Hugging Face's own, on your models.

    Every width and batch, greedy and sampled: the tokens must be those that the target emits by itself. Near-ties are
    counted apart (docs/exactness.md says what they are). Exits with 1 where an output differs.

    Examples:

      cast-ray check

      cast-ray check --target my/model --drafter my/drafter --prompts mine.jsonl --dtype float32
    """
    said = {"target": target, "drafter": drafter, "dtype": dtype, "device": device, "threads": threads}
    settings = load_settings(EngineConfig, config, said)
    chosen = [item.prompt for item in load_prompts(prompts, count)][:count]
    sizes = _sizes(batches)

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from cast_ray.stats.check import check as run_check  # loads torch, which --help need not

    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        found = run_check(
            settings,
            chosen,
            max_tokens=max_tokens,
            widths=[width.strip() for width in widths.split(",")],
            batches=sizes,
            temperature=temperature,
            seeds=range(seeds),
            report=lambda name, done, total: progress.update(task, description=name, completed=done, total=total),
        )
    table = Table("width", "batch", "tokens by", "against", "compared", "near-ties", "differ", box=None)
    for item in found.checked:
        counts = item.comparison
        row = (counts.tokens, counts.ties, len(counts.differences))
        table.add_row(item.width, str(item.batch), str(item.mode), item.against, *map(str, row))
    console.print(table, "", found.verdict(), sep="\n")
    if not found.holds:
        raise typer.Exit(EXIT_DIFFERENT)


def _sizes(text: str) -> list[int]:
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise typer.BadParameter(f"{text!r}: whole numbers of at least 1, such as 1,8", param_hint="--batches")
    return sorted({1, *sizes})
