"""A whole job: read, generate, write what is not there yet, sum up.

What can be found wrong beforehand is found before any engine starts and before anything is written.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cast_ray.batch.columns import check_columns
from cast_ray.batch.dry_run import render, show_plan
from cast_ray.batch.extras import ExtraColumns
from cast_ray.batch.formats import InputPlan, plan_input
from cast_ray.batch.job import SAMPLE_INPUT, JobConfig, is_demo, with_sample
from cast_ray.batch.lock import only_job
from cast_ray.batch.manifest import Manifest
from cast_ray.batch.names import Digests, digests
from cast_ray.batch.output import (
    REPORT_FILE,
    SUMMARY_FILE,
    OutputCounts,
    check_complete,
    check_output,
    clear_output,
    count_output,
    write_errors,
    write_json,
    write_openai,
)
from cast_ray.batch.parts import Parts
from cast_ray.batch.requests import RequestMaker, RequestSettings
from cast_ray.batch.session import check_cluster, plain_errors, quiet_ray_data
from cast_ray.batch.storage import Storage
from cast_ray.batch.writer import ErrorLimits, PartWriter
from cast_ray.pool.actor import EngineFactory, default_engine
from cast_ray.pool.cluster import ray_cluster
from cast_ray.stats.page import render_html
from cast_ray.stats.report import JobTimes, summarise

__all__ = ["SAMPLE_INPUT", "JobConfig", "run_job"]


@dataclass(frozen=True)
class _Job:
    """What is known before anything is started."""

    config: JobConfig
    whole: InputPlan
    plan: InputPlan  # of the rows of this run: all, or a pilot's
    settings: RequestSettings
    output: Storage | None
    output_format: str
    began: float

    def parts(self) -> Parts:
        assert self.output is not None
        kind, place = ("jsonl" if self.output_format == "jsonl" else "parquet"), self.output
        if self.output_format == "openai":
            place = Storage(place.filesystem, place.join("parts"), f"{place.shown}/parts")
        # Of an OpenAI Batch the body is needed as it stands, to name its model in the results.
        mixed = frozenset() if self.whole.is_openai else self.whole.json_columns
        return Parts(place, kind, self.whole.id_column, mixed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Run:
    """What one run did: its rows, `stats()` of its engines at the end, its times, tokens of its answers, its course."""

    rows: int
    actors: dict[str, dict[str, Any]]
    times: JobTimes
    tokens: int
    timeline: dict[str, Any]


def run_job(
    config: JobConfig, engine_factory: EngineFactory = default_engine, console: Console | None = None
) -> dict[str, Any]:
    """Run the job, or what is left of it, and return its summary; of a dry run, the plan. Uses the Ray cluster that the
    process is connected to, else the one in RAY_ADDRESS, else a local one for the time of the job.

    Raises InputError and ConfigError before anything is started or written, EngineError when the engines fail or more
    rows than the settings allow.
    """
    console = console or Console(stderr=True)
    job = _look(with_sample(config), time.monotonic())
    if job.config.dry_run:
        left = job.plan.rows
        if job.output is not None and Manifest.read(job.output) is not None and not job.config.overwrite:
            left -= min(left, len(job.parts().done(job.config.retry_errors)))
        plan = show_plan(job.config, job.plan, RequestMaker(job.settings), left, job.output_format)
        console.print(render(plan), highlight=False, markup=False, soft_wrap=True)
        return plan
    assert job.output is not None
    manifest = Manifest.of(job.config, job.whole, job.output_format, is_demo(job.config))
    _check(job, manifest)
    with only_job(job.output):
        manifest, done = _read_output(job, manifest)
        left = job.plan.rows - _done_of(job, done)
        if left <= 0:
            return _finish(job, manifest, console)
        check_cluster(job.config)
        with ray_cluster():
            return _generate(job, manifest, done, left, engine_factory, console)


def _look(config: JobConfig, began: float) -> _Job:
    assert config.input is not None
    output = Storage.of("output", config.output) if config.output is not None else None
    whole = plan_input(config.input, config.id_column)
    settings = RequestSettings(
        config=config,
        columns=tuple(whole.schema.names),
        id_column=whole.id_column,
        json_columns=whole.json_columns,
        is_openai=whole.is_openai,
        samples=whole.is_openai or config.n > 1 or config.output_format == "openai",
    )
    check_columns(whole.schema.names, ExtraColumns(config, settings.samples).names)
    RequestMaker(settings)
    output_format = config.output_format or ("openai" if whole.is_openai else "parquet")
    plan = whole.first(config.limit) if config.limit is not None else whole
    return _Job(config, whole, plan, settings, output, output_format, began)


def _check(job: _Job, manifest: Manifest) -> None:
    assert job.output is not None
    check_output(job.output, [file.path for file in job.whole.files], manifest, job.config.overwrite)


def _read_output(job: _Job, manifest: Manifest) -> tuple[Manifest, Digests]:
    """The manifest of the output, and digests of the rows that are done there."""
    assert job.output is not None
    _check(job, manifest)  # again: another job may have ended meanwhile
    there = Manifest.read(job.output)
    if there is None or job.config.overwrite:
        return manifest, digests(())
    parts = job.parts()
    job.output.remove_partials()
    parts.place.remove_partials()
    parts.settle()
    return there, parts.done(job.config.retry_errors)


def _begin_output(job: _Job, manifest: Manifest) -> None:
    assert job.output is not None
    if job.config.overwrite:
        clear_output(job.output, job.parts())
    # What is left of an earlier run must not look finished.
    for name in (SUMMARY_FILE, REPORT_FILE):
        job.output.remove(name)
    manifest.write(job.output)


def _done_of(job: _Job, done: Digests) -> int:
    """How many rows of this run are done; of a pilot that follows a longer run that has to be looked up."""
    if job.config.limit is None or not len(done):
        return len(done)
    from cast_ray.batch.source import Reading, read_tables

    reading = Reading.of(job.plan)
    left = sum(len(table) for piece in job.plan.pieces for table in read_tables(reading, piece, done))
    return job.plan.rows - left


def _generate(
    job: _Job, manifest: Manifest, done: Digests, left: int, factory: EngineFactory, console: Console
) -> dict[str, Any]:
    from cast_ray.batch.pipeline import Pipeline
    from cast_ray.batch.progress import JobProgress, start_tally
    from cast_ray.batch.source import read_dataset

    config, plan = job.config, job.plan
    already = f", {plan.rows - left} of them done" if left < plan.rows else ""
    console.print(
        f"{plan.rows} rows in {len(plan.files)} {plan.format} file(s){already}; starting engines", highlight=False
    )
    with quiet_ray_data(), ExitStack() as stack:
        pool = stack.enter_context(_engines(config, factory))
        for name, cause in pool.failed.items():
            console.print(f"{name} did not start and is left out: {cause}", highlight=False, soft_wrap=True)
        for warning in pool.warnings:
            console.print(warning, highlight=False, soft_wrap=True)
        _begin_output(job, manifest)
        started = time.monotonic()
        tally = start_tally()
        pipeline = Pipeline.of_job(job.settings, pool, tally)
        answered = pipeline(read_dataset(plan, done))
        progress = JobProgress(left, tally, pool, console, config.pool.stall_timeout_s)
        writer = PartWriter(job.parts())
        try:
            with progress, plain_errors(tally):
                progress.run(lambda: _write(answered, writer, _limits(job, done), progress.stopped))
        except BaseException:
            writer.close()
            # Once at its next block, else when it has no engines any more.
            progress.leave()
            stack.close()
            progress.leave()
            raise
        writer.close()
        finished = time.monotonic()
        actors = pool.stats()
    times = JobTimes(started - job.began, finished - started, finished - job.began)
    run = _Run(left, actors, times, progress.tokens, progress.timeline.to_dict())
    return _finish(job, manifest, console, run)


def _engines(config: JobConfig, factory: EngineFactory) -> Any:
    """A pool of the job's own, or the replicas of the application that it is attached to."""
    if config.attach is not None:
        from cast_ray.serve.attached import AttachedPool

        return AttachedPool(config.attach, config.pool.row_attempts)
    from cast_ray.pool.pool import EnginePool

    return EnginePool(config.engine, config.pool, factory)


def _limits(job: _Job, done: Digests) -> ErrorLimits:
    config = job.config
    failed = 0
    if config.max_error_rate is not None and len(done):
        failed = sum(row["error"] is not None for row in job.parts().all_rows(["error"]))
    failed = 0 if config.retry_errors else failed
    names = list(dict.fromkeys(name for name in (job.whole.id_column, job.whole.user_column) if name))
    return ErrorLimits(config.on_error, config.max_error_rate, names, len(done), failed)


def _write(answered: Any, writer: PartWriter, limits: ErrorLimits, stopped: threading.Event) -> None:
    """Every block as soon as it is there, until `stopped`. Nothing else writes: a task of Ray's may run twice."""
    blocks = answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)
    for block in blocks:
        if stopped.is_set():
            return
        if not len(block):
            continue
        block, end = limits.passed(block)
        writer.add(block)
        if end is not None:
            raise end
    if (end := limits.verdict()) is not None:
        raise end


def _finish(
    job: _Job,
    manifest: Manifest,
    console: Console,
    run: _Run | None = None,
) -> dict[str, Any]:
    """Count what is there, write what is made of it, and return the summary. run: None where nothing was left."""
    output, id_column = job.output, job.whole.id_column
    assert output is not None
    parts = job.parts()
    counts = count_output(parts, id_column)
    if counts.names < counts.rows:
        parts.settle()
        counts = count_output(parts, id_column)
    if job.config.limit is None:
        check_complete(counts, job.whole.rows)
    if job.output_format == "openai":
        write_openai(output, parts, id_column, manifest.created)
    else:
        write_errors(output, parts, id_column, job.whole.user_column)
    if run is None:
        console.print(f"nothing left to do: all {job.plan.rows} rows are in {output.shown}", highlight=False)
        elapsed = time.monotonic() - job.began
        run = _Run(0, {}, JobTimes(elapsed, 0.0, elapsed), 0, {})
    settings = job.config.model_dump(mode="json")
    summary = summarise(vars(counts), run.actors, run.times, settings, run.timeline) | _of_this_run(job, counts, run)
    write_json(output, SUMMARY_FILE, summary)
    output.write(REPORT_FILE, render_html(summary).encode())
    return summary


def _of_this_run(job: _Job, counts: OutputCounts, run: _Run) -> dict[str, Any]:
    """rows_now: those answered by this run. projected_s: what the rows not there yet would take at its rate."""
    # Equal rows may share their answer, so an own engine's count is the better one; others' engines did more than this.
    engines = sum((about.get("engine") or {}).get("tokens_generated", 0) for about in run.actors.values())
    tokens = run.tokens if job.config.attach is not None or not engines else engines
    left = job.whole.rows - counts.rows
    seconds = run.times.generate_s
    per_row = seconds / run.rows if run.rows else None
    return {
        "rows_now": run.rows,
        "rows_left": left,
        "projected_s": left * per_row + run.times.start_s if per_row is not None and left else None,
        # None of a run that had nothing to answer, or to which every row was an error.
        "tokens_per_s": tokens / seconds if seconds > 0 and tokens else None,
    }
