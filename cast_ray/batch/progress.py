"""What a person sees while a job runs: a bar on a terminal, a line every few seconds in a log; and the watch over it.

It looks at the engines and counts rows. It decides one thing: that a job in which nothing has moved for too long ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cast_ray.errors import EngineError, describe
from cast_ray.pool.pool import EnginePool
from cast_ray.stats.timeline import Sample, Timeline, grown

logger = logging.getLogger(__name__)
LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.5
# Rates shown are of this long a time back.
RECENT_S = 30.0
# Longest wait for the end of a job that was interrupted.
LEAVE_S = 5.0
_MOST_WIDTHS = 8

Result = TypeVar("Result")

_STAGES = {
    "reading": "Check that the input's storage answers and that the cluster has free CPUs (`ray status`)",
    "generating": "See the engines' logs in Ray's session folder; raise it where nodes take that long to come",
    "writing": "Check that the output's storage answers and that the cluster has free CPUs (`ray status`)",
}


class Tally:
    """An actor that hears from the stage: rows that came and rows done, and why it failed. The report counts the output
    instead."""

    def __init__(self) -> None:
        self._counts = {"arrived": 0, "rows": 0, "errors": 0, "tokens": 0}
        self._failure: str | None = None

    def arrive(self, rows: int) -> None:
        self._counts["arrived"] += rows

    def add(self, rows: int, errors: int, tokens: int) -> None:
        self._counts["rows"] += rows
        self._counts["errors"] += errors
        self._counts["tokens"] += tokens

    def fail(self, cause: str) -> None:
        self._failure = self._failure or cause

    def read(self) -> dict[str, Any]:
        """arrived, rows, errors and tokens so far; failure: what ended the stage, or None."""
        return {**self._counts, "failure": self._failure}


def start_tally() -> Any:
    """A tally on the driver's node, so that it is not lost with another one."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(Tally).options(num_cpus=0, scheduling_strategy=here).remote()


class StallWatch:
    """Whether nothing at all has moved for too long, and at which stage that is. timeout_s None: never."""

    def __init__(self, total: int, timeout_s: float | None) -> None:
        self._total = total
        self._timeout_s = timeout_s
        self._seen: Hashable = None
        self._since = 0.0

    def look(self, seconds: float, arrived: int, rows: int, steps: int) -> EngineError | None:
        """The end of the job, or None. steps: of all engines together; any change is life."""
        if (arrived, rows, steps) != self._seen:
            self._seen, self._since = (arrived, rows, steps), seconds
        if self._timeout_s is None or seconds - self._since < self._timeout_s:
            return None
        stage = "writing" if rows >= self._total else "generating" if arrived > rows else "reading"
        problem = (
            f"nothing moved for that long while {stage} "
            f"({arrived} of {self._total} rows read, {rows} answered). The job is ended"
        )
        return EngineError(describe("pool.stall_timeout_s", self._timeout_s, problem, _STAGES[stage]))


class JobProgress:
    """Shows progress from a thread of its own for as long as its `with` block runs. timeline: what it has seen."""

    def __init__(
        self, total: int, tally: Any, pool: EnginePool, console: Console, stall_timeout_s: float | None = None
    ) -> None:
        self.timeline = Timeline()
        self._total = total
        self._tally = tally
        self._pool = pool
        self._console = console
        self._watch = StallWatch(total, stall_timeout_s)
        self._counts: dict[str, Any] = {"arrived": 0, "rows": 0, "errors": 0, "tokens": 0}
        self._steps: dict[str, int] = {}
        self._ready = 0
        self._stalled: EngineError | None = None
        self._over = threading.Event()
        self._done = threading.Event()
        self._work: threading.Thread | None = None
        self.stopped = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cast-ray-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=10)
        if self._stalled is None:
            self._look()

    @property
    def tokens(self) -> int:
        """Of the answers so far, as last seen."""
        return int(self._counts["tokens"])

    def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, or EngineError as soon as the job stalls. What hangs cannot be called off, so it is
        left behind in a thread that does not keep the process alive; see `leave`."""
        future: Future[Result] = Future()

        def call() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self._over.set()

        self._work = threading.Thread(target=call, name="cast-ray-job", daemon=True)
        self._work.start()
        self._over.wait()
        if self._stalled is not None and not future.done():
            raise self._stalled
        return future.result()

    def leave(self) -> None:
        """Wait a while for work that was interrupted; it ends at its next block, where it looks at `stopped`, or after
        the engines have ended. What still ran without the cluster would connect to another one."""
        self.stopped.set()
        if self._work is not None:
            self._work.join(timeout=LEAVE_S)

    def _run(self) -> None:
        if not self._console.is_terminal:
            while not self._done.wait(LINE_EVERY_S):
                self._look()
                line = f"{self._counts['rows']}/{self._total} rows, {self._status()}"
                self._console.print(line, highlight=False, soft_wrap=True)
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
                self._look()
                bar.update(task, completed=self._counts["rows"], description=self._status())

    def _look(self) -> None:
        stats: dict[str, dict[str, Any]] = {}
        try:
            self._counts = ray.get(self._tally.read.remote(), timeout=2)
            stats = self._pool.stats(timeout_s=2)
        except Exception as error:
            # What was seen last still stands, and the job's own thread tells what is wrong.
            logger.debug("no news of the job: %s", error)
        engines = {name: about["engine"] for name, about in stats.items() if about["engine"]}
        if stats:
            self._ready = len(engines)
        self._steps.update({name: engine["steps"] for name, engine in engines.items()})
        seconds = time.monotonic() - self._began
        self.timeline.add(seconds, self._counts["rows"], stats)
        steps = sum(self._steps.values())
        self._stalled = self._watch.look(seconds, self._counts["arrived"], self._counts["rows"], steps)
        if self._stalled is not None:
            self._over.set()

    def _status(self) -> str:
        parts = [f"{self._counts['errors']} errors"]
        span = self.timeline.since(RECENT_S)
        if span is not None:
            parts += _recent(*span, self._total)
        parts.append(f"{self._ready} engine{'' if self._ready == 1 else 's'}")
        return ", ".join(parts)


def _recent(old: Sample, new: Sample, total: int) -> list[str]:
    """Rate, round length, widths and time left, as the last moments had them."""
    seconds = new.seconds - old.seconds
    tokens, rounds = grown(old, new, None, "tokens_committed"), grown(old, new, None, "rounds")
    parts = [f"{tokens / seconds:.1f} tokens/s"]
    if rounds:
        parts.append(f"round length {tokens / rounds:.2f}")
        widths = [
            f"{grown(old, new, name, 'nodes_verified') / own:.0f}"
            for name in new.actors
            if (own := grown(old, new, name, "rounds")) > 0
        ]
        more = " …" if len(widths) > _MOST_WIDTHS else ""
        parts.append(f"width {' '.join(widths[:_MOST_WIDTHS])}{more}")
    if new.rows > old.rows:
        left = (total - new.rows) * seconds / (new.rows - old.rows)
        parts.append(f"{_clock(left)} left")
    return parts


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
