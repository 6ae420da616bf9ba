"""A whole job: read, generate, write Parquet, sum up.

What can be found wrong beforehand is found before any engine starts and before anything is written.
"""

from __future__ import annotations

import importlib.resources
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from cast_ray.batch.columns import check_columns
from cast_ray.batch.formats import InputPlan, plan_input
from cast_ray.batch.output import (
    JOB_FILE,
    SUMMARY_FILE,
    begin_output,
    check_complete,
    check_output,
    count_output,
    write_json,
)
from cast_ray.batch.paths import check_local
from cast_ray.batch.prepare import find_prompt_column
from cast_ray.config import BatchConfig
from cast_ray.errors import ConfigError, EngineError, describe
from cast_ray.pool.actor import EngineFactory, default_engine
from cast_ray.stats.report import JobTimes, summarise

SAMPLE_INPUT = Path(str(importlib.resources.files("cast_ray"))) / "data" / "sample_prompts.jsonl"
SAMPLE_OUTPUT = Path("demo-output")
# Blocks are gathered into files of at least this many rows, or large inputs would make thousands of small files.
_ROWS_A_FILE = 1024


class JobConfig(BatchConfig):
    """A batch job on files. Without `input` it answers the sample prompts that come with the package."""

    input: str | None = Field(None, description="Parquet, JSONL or CSV: a file, a folder or a quoted glob")
    output: str | None = Field(None, description="folder for the Parquet files and summary.json")
    overwrite: bool = Field(False, description="replace the output of an earlier job in that folder")


def run_job(
    config: JobConfig, engine_factory: EngineFactory = default_engine, console: Console | None = None
) -> dict[str, Any]:
    """Run the job and return its summary. Uses the Ray cluster that the process is connected to, else the one in
    RAY_ADDRESS, else a local one for the time of the job.

    Raises InputError and ConfigError before anything is started or written, EngineError when the engines fail.
    """
    console = console or Console(stderr=True)
    began = time.monotonic()
    config = _with_sample(config)
    assert config.input is not None
    assert config.output is not None
    check_local("output", config.output)
    plan = plan_input(config.input)
    check_columns(plan.schema.names)
    find_prompt_column(plan.schema.names, config.prompt_column, config.messages_column, plan.json_columns)
    output = Path(config.output).absolute()
    check_output(output, plan.files, config.overwrite)
    with _ray_cluster():
        return _generate(config, plan, output, engine_factory, console, began)


def _with_sample(config: JobConfig) -> JobConfig:
    """config with input and output filled in. The demo's own output may be replaced without asking."""
    if config.input is not None:
        if config.output is None:
            raise ConfigError(describe("output", None, "is missing", "Name a folder with --output DIR"))
        return config
    output = Path(config.output) if config.output is not None else SAMPLE_OUTPUT
    return config.replace(
        input=str(SAMPLE_INPUT),
        output=str(output),
        overwrite=config.overwrite or (config.output is None and _is_demo(output)),
    )


def _is_demo(output: Path) -> bool:
    try:
        return json.loads((output / JOB_FILE).read_text(encoding="utf-8"))["demo"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _ray_cluster() -> Iterator[None]:
    """A connection to a cluster, ended again if it was made here."""
    import ray

    if ray.is_initialized():
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    else:
        # "local", or Ray would join whatever cluster it finds on this machine.
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _generate(
    config: JobConfig, plan: InputPlan, output: Path, factory: EngineFactory, console: Console, began: float
) -> dict[str, Any]:
    import ray
    from ray.data.datasource import FilenameProvider

    from cast_ray.batch.pipeline import Pipeline
    from cast_ray.batch.progress import JobProgress, start_tally
    from cast_ray.batch.source import read_dataset
    from cast_ray.pool.pool import EnginePool

    settings = config.model_dump(mode="json")
    console.print(f"{plan.rows} rows in {len(plan.files)} {plan.format} file(s); starting engines", highlight=False)
    with quiet_ray_data(), EnginePool(config.engine, config.pool, factory) as pool:
        for name, cause in pool.failed.items():
            console.print(f"{name} did not start and is left out: {cause}", highlight=False, soft_wrap=True)
        started = time.monotonic()
        tag = begin_output(output, {"demo": config.input == str(SAMPLE_INPUT), "settings": settings})
        tally = start_tally()
        pipeline = Pipeline(config, pool=pool, json_columns=plan.json_columns, tally=tally)
        names = FilenameProvider(dataset_uuid=tag, file_format="parquet")
        with JobProgress(plan.rows, tally, pool, console), plain_errors(tally):
            answered = pipeline(read_dataset(plan))
            answered.write_parquet(str(output), min_rows_per_file=_ROWS_A_FILE, filename_provider=names)
        finished = time.monotonic()
        actors = pool.stats()
    counts = count_output(output, plan.id_column)
    check_complete(counts, plan.rows, nodes=sum(node["Alive"] for node in ray.nodes()))
    times = JobTimes(started - began, finished - started, finished - began)
    summary = summarise(vars(counts), actors, times, settings)
    write_json(output / SUMMARY_FILE, summary)
    return summary


@contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Ray Data without its own bars and notices: the job shows its own."""
    from ray.data import DataContext

    context = DataContext.get_current()
    logger = logging.getLogger("ray.data")
    before = context.enable_progress_bars, context.print_on_execution_start, logger.level
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before[:2]
        logger.setLevel(before[2])


@contextmanager
def plain_errors(tally: Any) -> Iterator[None]:
    """What made the stage fail, as the stage told it: Ray Data passes on only a traceback's text."""
    import ray

    try:
        yield
    except Exception:
        failure = ray.get(tally.read.remote())["failure"]
        if failure is not None:
            raise EngineError(failure) from None
        raise
