"""The `cast-ray` command. Options only: what they mean is in `config`, and what is done with them in `batch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from cast_ray.batch.driver import JobConfig, run_job
from cast_ray.config import EngineConfig, PoolConfig, load_settings
from cast_ray.errors import CastRayError, EngineError
from cast_ray.stats.report import render
from cast_ray.training.command import train_drafter

# Columns of the report where there is no terminal to ask.
REPORT_WIDTH = 120
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="cast-ray", help="Lossless batch generation on Ray.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def _commands() -> None:
    """Lossless batch generation on Ray."""


def _option(kind: type[EngineConfig | PoolConfig | JobConfig], field: str, *names: str) -> Any:
    """An option whose help and default are those of a setting; its value is None when it is not said."""
    about = kind.model_fields[field]
    text = about.description or ""
    text = text[0].upper() + text[1:]
    if about.default is not None and about.default is not False:
        text += f" (default {about.default})"
    return typer.Option(*(names or (f"--{field.replace('_', '-')}",)), help=text, show_default=False)


@app.command()
def generate(
    input: Annotated[str | None, _option(JobConfig, "input")] = None,
    output: Annotated[str | None, _option(JobConfig, "output")] = None,
    prompt_column: Annotated[str | None, _option(JobConfig, "prompt_column")] = None,
    messages_column: Annotated[str | None, _option(JobConfig, "messages_column")] = None,
    target: Annotated[str | None, _option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, _option(EngineConfig, "drafter")] = None,
    max_tokens: Annotated[int | None, _option(JobConfig, "max_tokens")] = None,
    temperature: Annotated[float | None, _option(JobConfig, "temperature")] = None,
    seed: Annotated[int | None, _option(JobConfig, "seed")] = None,
    width: Annotated[str | None, _option(EngineConfig, "width")] = None,
    replicas: Annotated[int | None, _option(PoolConfig, "replicas")] = None,
    dtype: Annotated[str | None, _option(EngineConfig, "dtype")] = None,
    max_batch_size: Annotated[int | None, _option(EngineConfig, "max_batch_size")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
    overwrite: Annotated[bool, _option(JobConfig, "overwrite", "--overwrite")] = False,
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


app.command()(train_drafter)


def run(command: Callable[[], Any]) -> None:
    """Call command and leave the process: 0 when done, 2 for bad input or settings, 1 for a failure, one line each."""
    try:
        command()
    except CastRayError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_FAILURE if isinstance(error, EngineError) else EXIT_BAD_INPUT)


def main() -> None:
    """The console script."""
    run(app)


def main_generate() -> None:
    """`generate` by itself, for jobs/batch_generate.py."""
    run(lambda: typer.run(generate))


def main_train_drafter() -> None:
    """`train-drafter` by itself, for jobs/train_drafter.py."""
    run(lambda: typer.run(train_drafter))


if __name__ == "__main__":
    main()
