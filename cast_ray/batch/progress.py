"""What a person sees while a job runs: a bar on a terminal, a line every few seconds in a log. Decides nothing."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Self

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cast_ray.pool.pool import EnginePool

logger = logging.getLogger(__name__)
LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.5


class Tally:
    """An actor that hears from the stage: finished rows, and why it failed. The report counts the output instead."""

    def __init__(self) -> None:
        self._counts = {"rows": 0, "errors": 0, "tokens": 0}
        self._failure: str | None = None

    def add(self, rows: int, errors: int, tokens: int) -> None:
        self._counts["rows"] += rows
        self._counts["errors"] += errors
        self._counts["tokens"] += tokens

    def fail(self, cause: str) -> None:
        self._failure = self._failure or cause

    def read(self) -> dict[str, Any]:
        """rows, errors and tokens so far; failure: what ended the stage, or None."""
        return {**self._counts, "failure": self._failure}


def start_tally() -> Any:
    return ray.remote(Tally).options(num_cpus=0).remote()


class JobProgress:
    """Shows progress from a thread of its own for as long as its `with` block runs."""

    def __init__(self, total: int, tally: Any, pool: EnginePool, console: Console) -> None:
        self._total = total
        self._tally = tally
        self._pool = pool
        self._console = console
        self._counts: dict[str, Any] = {"rows": 0, "errors": 0}
        self._engines: dict[str, dict[str, Any]] = {}
        self._done = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cast-ray-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        if not self._console.is_terminal:
            while not self._done.wait(LINE_EVERY_S):
                rows, status = self._status()
                self._console.print(f"{rows}/{self._total} rows, {status}", highlight=False, soft_wrap=True)
            return
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task("", total=self._total)
            while not self._done.wait(BAR_EVERY_S):
                rows, status = self._status()
                bar.update(task, completed=rows, description=status)

    def _status(self) -> tuple[int, str]:
        try:
            self._counts = ray.get(self._tally.read.remote(), timeout=2)
            for name, about in self._pool.stats(timeout_s=2).items():
                if about["engine"]:
                    self._engines[name] = about["engine"]
        except Exception as error:
            # What was seen last still stands, and the job's own thread tells what is wrong.
            logger.debug("no news of the job: %s", error)
        engines = self._engines.values()
        rounds = sum(engine["rounds"] for engine in engines)
        length = sum(engine["rounds"] * engine["mean_round_length"] for engine in engines) / rounds if rounds else 0.0
        rate = sum(engine["tokens_generated"] for engine in engines) / (time.monotonic() - self._began)
        return self._counts["rows"], (
            f"{self._counts['errors']} errors, {rate:.1f} tokens/s, round length {length:.2f}, "
            f"{len(engines)} engine{'' if len(engines) == 1 else 's'}"
        )
