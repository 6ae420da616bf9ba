"""Ray and Ray Data as a job has them: the right cluster, quiet, and with plain errors."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cast_ray.batch.job import JobConfig
from cast_ray.errors import ConfigError, EngineError, describe


def check_cluster(config: JobConfig) -> None:
    """An application runs on a cluster that is there: on one of the job's own it would be looked for in vain."""
    import ray

    if config.attach is not None and not os.environ.get("RAY_ADDRESS") and not ray.is_initialized():
        problem = "the application's cluster is not named"
        remedy = "Set RAY_ADDRESS to the cluster that it runs on (RAY_ADDRESS=auto finds one on this machine)"
        raise ConfigError(describe("attach", config.attach, problem, remedy))


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
