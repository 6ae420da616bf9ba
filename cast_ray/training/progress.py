"""What a person sees of a training job: a bar on a terminal, lines in a log, a plot at the end. Decides nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cast_ray.training.answers import Report
from cast_ray.training.config import TrainConfig
from cast_ray.training.files import write_whole
from cast_ray.training.loop import Scores
from cast_ray.training.state import TrainingState

LINE_EVERY_S = 20.0
# Weight of the newest step in the numbers shown.
NEWEST = 0.05


def step_report(console: Console) -> Report:
    """A line for each finished shard of a step, with the time left at the present pace."""
    began: dict[str, tuple[float, int]] = {}

    def report(what: str, done: int, total: int) -> None:
        start, first = began.setdefault(what, (time.monotonic(), done))
        left = (time.monotonic() - start) / (done - first) * (total - done) if done > first else None
        tail = f", about {left / 60:.0f} min left" if left else ""
        console.print(f"{what}: {done}/{total}{tail}", highlight=False)

    return report


class TrainingProgress:
    """Shows loss, top-1 accuracy at depth 1 and expected round length of the chain, smoothed over some twenty steps."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        self._console = console
        self._seen = ""
        self._smooth: tuple[float, float, float] | None = None
        self._shown = 0.0
        columns = (TextColumn("training"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._seen:
            self._console.print(self._seen, highlight=False)

    def step(self, state: TrainingState, scores: Scores, progress: float) -> None:
        new = (scores.loss, scores.first, scores.round_length)
        old = self._smooth or new
        self._smooth = tuple(o + NEWEST * (n - o) for o, n in zip(old, new, strict=True))  # type: ignore[assignment]
        assert self._smooth is not None
        loss, first, length = self._smooth
        self._seen = (
            f"step {state.step}, {state.seconds / 60:.1f} min, {progress:.0%}: loss {loss:.3f}, "
            f"top-1 at depth 1 {first:.3f}, expected round length {length:.3f}"
        )
        self._bar.update(self._task, completed=progress, description=self._seen)
        if not self._console.is_terminal and time.monotonic() - self._shown > LINE_EVERY_S:
            self._shown = time.monotonic()
            self._console.print(self._seen, highlight=False)

    def plot(self, state: TrainingState, folder: Path) -> None:
        """loss.png: loss and expected round length over steps; a message where matplotlib is missing."""
        if not state.history:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self._console.print("no loss plot: pip install 'cast_ray[report]'", highlight=False)
            return
        steps, losses, _, lengths = zip(*state.history, strict=True)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axis = figure.add_subplot()
        axis.plot(steps, losses, color="tab:blue", linewidth=0.8)
        axis.set_xlabel("step")
        axis.set_ylabel("loss", color="tab:blue")
        other: Any = axis.twinx()
        other.plot(steps, lengths, color="tab:orange", linewidth=0.8)
        other.set_ylabel("expected round length of the chain", color="tab:orange")
        write_whole(folder / "loss.png", lambda part: figure.savefig(part, format="png", dpi=120))
