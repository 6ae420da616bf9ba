"""`cast-ray generate`: a batch job. Options only: settings say what they mean, `batch` does what they ask."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from cast_ray.batch.job import JobConfig
from cast_ray.commands import EXIT_INTERRUPTED
from cast_ray.commands.options import option
from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import ConfigError, describe
from cast_ray.settings import load_settings

# Columns of the report where there is no terminal to ask.
REPORT_WIDTH = 120


def generate(
    input: Annotated[str | None, option(JobConfig, "input")] = None,
    output: Annotated[str | None, option(JobConfig, "output")] = None,
    output_format: Annotated[str | None, option(JobConfig, "output_format")] = None,
    prompt_column: Annotated[str | None, option(JobConfig, "prompt_column")] = None,
    messages_column: Annotated[str | None, option(JobConfig, "messages_column")] = None,
    template: Annotated[str | None, option(JobConfig, "template")] = None,
    system: Annotated[str | None, option(JobConfig, "system")] = None,
    chat: Annotated[bool | None, option(JobConfig, "chat", "--chat/--no-chat")] = None,
    chat_template_kwargs: Annotated[str | None, option(JobConfig, "chat_template_kwargs")] = None,
    id_column: Annotated[str | None, option(JobConfig, "id_column")] = None,
    max_tokens: Annotated[int | None, option(JobConfig, "max_tokens")] = None,
    temperature: Annotated[float | None, option(JobConfig, "temperature")] = None,
    seed: Annotated[int | None, option(JobConfig, "seed")] = None,
    n: Annotated[int | None, option(JobConfig, "n", "--n")] = None,
    sampling: Annotated[str | None, option(JobConfig, "sampling")] = None,
    sampling_column: Annotated[str | None, option(JobConfig, "sampling_column")] = None,
    sampling_columns: Annotated[
        str | None, typer.Option(help="Columns, divided by commas, that hold a row's own value of that parameter")
    ] = None,
    choices: Annotated[
        str | None, typer.Option(help="Labels, divided by commas (or a YAML list); every answer is one of them")
    ] = None,
    choice_probabilities: Annotated[bool, option(JobConfig, "choice_probabilities", "--choice-probabilities")] = False,
    regex: Annotated[str | None, option(JobConfig, "regex")] = None,
    json_schema: Annotated[str | None, option(JobConfig, "json_schema")] = None,
    dedupe: Annotated[bool, option(JobConfig, "dedupe", "--dedupe")] = False,
    group_prefixes: Annotated[bool, option(JobConfig, "group_prefixes", "--group-prefixes")] = False,
    target: Annotated[str | None, option(EngineConfig, "target")] = None,
    drafter: Annotated[str | None, option(EngineConfig, "drafter")] = None,
    width: Annotated[str | None, option(EngineConfig, "width")] = None,
    dtype: Annotated[str | None, option(EngineConfig, "dtype")] = None,
    max_batch_size: Annotated[int | None, option(EngineConfig, "max_batch_size")] = None,
    replicas: Annotated[int | None, option(PoolConfig, "replicas")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
    dry_run: Annotated[bool, option(JobConfig, "dry_run", "--dry-run")] = False,
    limit: Annotated[int | None, option(JobConfig, "limit")] = None,
    on_error: Annotated[str | None, option(JobConfig, "on_error")] = None,
    max_error_rate: Annotated[float | None, option(JobConfig, "max_error_rate")] = None,
    retry_errors: Annotated[bool, option(JobConfig, "retry_errors", "--retry-errors")] = False,
    attach: Annotated[str | None, option(JobConfig, "attach")] = None,
    overwrite: Annotated[bool, option(JobConfig, "overwrite", "--overwrite")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting: engine.threads=4, pool.row_attempts=2, ...")
    ] = None,
) -> None:
    """Answer every row of a dataset, and write the rows with their answers as they come.

    Without arguments it answers the sample prompts of the package and writes to ./demo-output.
    Prompts are taken from the column messages, prompt or text, the first that is there, unless one is named.
    A row that cannot be answered gets its reason in the column error; the others go on.
    What is in the output folder is done: a job that was killed goes on when the same command is given again.

    Examples:

      cast-ray generate --input prompts.jsonl --output answers

      Look first, then try 200 rows, then do the rest:
      cast-ray generate --input 'data/*.parquet' --output answers --prompt-column question --dry-run
      cast-ray generate --input 'data/*.parquet' --output answers --prompt-column question --limit 200

      Label with one of three words, and how likely each is:
      cast-ray generate --input reviews.csv --output labels --template 'Sentiment of: {{ review }}'
      --choices positive,neutral,negative --choice-probabilities

      Extract fields into typed columns:
      cast-ray generate --input mails.parquet --output fields --template 'Who wrote {{ body }}?' --json-schema s.json

      Run what failed once more:
      cast-ray generate --input prompts.jsonl --output answers --retry-errors

      An OpenAI Batch file in, answers/output.jsonl and answers/errors.jsonl out:
      cast-ray generate --input batch.jsonl --output answers

      ray job submit --working-dir . -- python jobs/batch_generate.py --config job.yaml
    """
    overrides: dict[str, Any] = {
        "input": input,
        "output": output,
        "output_format": output_format,
        "prompt_column": prompt_column,
        "messages_column": messages_column,
        "template": template,
        "system": system,
        "chat": chat,
        "chat_template_kwargs": _mapping("chat_template_kwargs", chat_template_kwargs),
        "id_column": id_column,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "n": n,
        "sampling": _mapping("sampling", sampling),
        "sampling_column": sampling_column,
        "sampling_columns": _listed("sampling_columns", sampling_columns),
        "choices": _listed("choices", choices),
        "choice_probabilities": choice_probabilities or None,
        "regex": regex,
        "json_schema": json_schema,
        "dedupe": dedupe or None,
        "group_prefixes": group_prefixes or None,
        "dry_run": dry_run or None,
        "limit": limit,
        "on_error": on_error,
        "max_error_rate": max_error_rate,
        "retry_errors": retry_errors or None,
        "attach": attach,
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
    for assignment in set_ or ():
        _assign(overrides, assignment)
    settings = load_settings(JobConfig, config, overrides)
    # Ray Data and the report take seconds to import, which `--help` and a wrong setting need not wait for.
    from cast_ray.batch.driver import run_job
    from cast_ray.stats.report import render

    try:
        summary = run_job(settings)
    except KeyboardInterrupt:
        print("stopped. What is answered is kept; the same command goes on with the rest", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if settings.dry_run:
        return
    # In a log the table is not to be squeezed into the 80 columns that are assumed there.
    console = Console()
    console = console if console.is_terminal else Console(width=REPORT_WIDTH)
    console.print(render(summary))
    if summary["projected_s"] is not None:
        left = summary["rows_left"]
        shown = "1 row is left" if left == 1 else f"{left} rows are left"
        console.print(f"{shown}: about {_duration(summary['projected_s'])} at this rate")


def _mapping(field: str, text: str | None) -> dict[str, Any] | None:
    """A mapping as YAML or JSON has it, or as `name=value,name=value`."""
    if text is None:
        return None
    try:
        found = yaml.safe_load(text)
        if isinstance(found, str) and "=" in found:
            pairs = (pair.partition("=") for pair in found.split(","))
            found = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(describe(field, text, "is no mapping", "Write top_p=0.9,top_k=40 or '{top_p: 0.9}'"))
    return found


def _listed(field: str, text: str | None) -> list[str] | None:
    """Words divided by commas, or a list as YAML and JSON have it."""
    if text is None:
        return None
    if text.lstrip().startswith("["):
        try:
            return [str(item) for item in yaml.safe_load(text)]
        except yaml.YAMLError:
            raise ConfigError(describe(field, text, "is no list", "Write a,b,c or '[a, b, c]'")) from None
    return [part.strip() for part in text.split(",") if part.strip()]


def _assign(overrides: dict[str, Any], assignment: str) -> None:
    """`a.b=value` laid into nested settings; the value as YAML reads it."""
    path, sign, value = assignment.partition("=")
    *outer, name = path.strip().split(".")
    if not sign or not name:
        raise ConfigError(describe("set", assignment, "names no setting", "Write engine.threads=4"))
    place = overrides
    for part in outer:
        inner = place.get(part)
        place[part] = inner if isinstance(inner, dict) else {}
        place = place[part]
    try:
        place[name] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(describe("set", assignment, "has no value that can be read", "Quote it")) from None


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
