"""A job in which nothing moves is ended with the stage at which it stands; anything that moves keeps it alive."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from rich.console import Console

from cast_ray.batch.progress import JobProgress, StallWatch
from cast_ray.errors import EngineError


@pytest.mark.parametrize(
    ("arrived", "rows", "stage"),
    [(0, 0, "reading"), (40, 40, "reading"), (40, 10, "generating"), (100, 100, "writing")],
)
def test_a_stall_names_its_stage(arrived: int, rows: int, stage: str) -> None:
    watch = StallWatch(100, 60)
    assert watch.look(0, arrived, rows, 5) is None
    assert watch.look(59, arrived, rows, 5) is None
    error = watch.look(61, arrived, rows, 5)
    assert f"pool.stall_timeout_s=60: nothing moved for that long while {stage} " in str(error)
    assert f"({arrived} of 100 rows read, {rows} answered)" in str(error)


@pytest.mark.parametrize("moving", ["arrived", "rows", "steps"])
def test_whatever_moves_is_life(moving: str) -> None:
    watch = StallWatch(100, 60)
    for minute in range(10):
        state = {"arrived": 50, "rows": 20, "steps": 7, moving: minute}
        assert watch.look(50.0 * minute, **state) is None


def test_without_a_timeout_a_job_may_stand_for_ever() -> None:
    watch = StallWatch(100, None)
    assert watch.look(0, 1, 0, 0) is None
    assert watch.look(1e9, 1, 0, 0) is None


def test_work_is_left_behind_when_it_stalls_and_its_own_error_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = JobProgress(10, None, None, Console(quiet=True), 1.0)  # type: ignore[arg-type]
    assert progress.run(lambda: 7) == 7

    def fails() -> Any:
        raise KeyError("own")

    progress = JobProgress(10, None, None, Console(quiet=True), 1.0)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="own"):
        progress.run(fails)

    progress = JobProgress(10, None, None, Console(quiet=True), 0.2)  # type: ignore[arg-type]
    monkeypatch.setattr("cast_ray.batch.progress.LINE_EVERY_S", 0.1)
    hanging = threading.Event()
    with progress, pytest.raises(EngineError, match="while reading"):
        progress.run(hanging.wait)
    hanging.set()
