"""`cast-ray generate`: a batch job. Options only: settings say what they mean, `batch` does what they ask."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.commands.options import option
from cast_ray.config import EngineConfig, PoolConfig, load_settings
from cast_ray.stats.report import render

# Columns of the report where there is no terminal to ask.
REPORT_WIDTH = 120


def generate(
    input: Annotated[str | None, option(JobConfig, "input")] = None,
    output: Annotated[str | None, option(JobConfig, "output")] = None,
    prompt_column: Annotated[str | None, option(JobConfig, "prompt_column")] = None,
    messages_column: Annotated[str | None, option(JobConfig, "messages_column")] = None,
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    max_tokens: Annotated[int | None, option(JobConfig, "max_tokens")] = None,
    temperature: Annotated[float | None, option(JobConfig, "temperature")] = None,
    seed: Annotated[int | None, option(JobConfig, "seed")] = None,
    width: Annotated[str | None, option(EngineConfig, "width")] = None,
    replicas: Annotated[int | None, option(PoolConfig, "replicas")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    max_batch_size: Annotated[int | None, option(EngineConfig, "max_batch_size")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
    overwrite: Annotated[bool, option(JobConfig, "overwrite", "--overwrite")] = False,
) -> None:
    """Answer every row of a dataset, and write the rows with their answers as Parquet.

    Without arguments it answers the sample prompts of the package and writes to ./demo-output.
    Prompts are taken from the column messages, prompt or text, the first that is there, unless one is named.
    A row that cannot be answered gets its reason in the column error; the others go on.

    Examples:

      cast-ray generate --input prompts.jsonl --output answers

      cast-ray generate --input 'data/*.parquet' --output answers --prompt-column question --max-tokens 64

      cast-ray generate --input chats.jsonl --output answers --messages-column turns --temperature 0.7 --seed 1

      ray job submit --working-dir . -- python jobs/batch_generate.py --config job.yaml
    """
    overrides = {
        "input": input,
        "output": output,
        "prompt_column": prompt_column,
        "messages_column": messages_column,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "overwrite": overwrite or None,
        "engine": {
            "target": target,
            "drafter": drafter,
            "width": width,
            "dtype": dtype,
            "max_batch_size": max_batch_size,
        },
        "pool": {"replicas": replicas},
    }
    summary = run_job(load_settings(JobConfig, config, overrides))
    # In a log the table is not to be squeezed into the 80 columns that are assumed there.
    console = Console()
    console = console if console.is_terminal else Console(width=REPORT_WIDTH)
    console.print(render(summary))
