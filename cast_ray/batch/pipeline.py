"""`build_pipeline`: a function from dataset to dataset, in the shape of `ray.data.llm`, for other Ray Data code.

It reads and writes no files; `driver` does that around it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cast_ray.batch.columns import check_columns, identity_column
from cast_ray.batch.extras import ExtraColumns
from cast_ray.batch.requests import RequestMaker, RequestSettings
from cast_ray.batch.stage import Stage
from cast_ray.config import BatchConfig
from cast_ray.errors import InputError, describe
from cast_ray.pool.actor import EngineFactory, default_engine
from cast_ray.pool.pool import EnginePool

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]

# Batches that wait in the stage beyond those the engines hold, so that their queue never runs dry.
_SPARE_CALLS = 2


class Pipeline:
    """`pipeline(dataset)` is the dataset with the output columns. The engines start at the first call and live until
    `close`, or the end of a `with` block; datasets made by it must have been consumed by then."""

    def __init__(
        self,
        config: BatchConfig,
        preprocess: RowFunction | None = None,
        postprocess: RowFunction | None = None,
        engine_factory: EngineFactory = default_engine,
    ) -> None:
        self._config = config
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._engine_factory = engine_factory
        self._pool: EnginePool | None = None
        self._tally: Any | None = None
        self._settings: RequestSettings | None = None

    @classmethod
    def of_job(cls, settings: RequestSettings, pool: EnginePool, tally: Any) -> Pipeline:
        """One for the driver, which knows the columns, has a pool of its own, and wants to be told of finished rows."""
        made = cls(settings.config)
        made._settings, made._pool, made._tally = settings, pool, tally
        return made

    def __call__(self, dataset: Dataset) -> Dataset:
        """Lazy, like every dataset. Raises InputError for a missing column or one that an output would overwrite."""
        config = self._config
        if self._preprocess is not None:
            dataset = dataset.map(self._preprocess)
        settings = self._settings or self._look(dataset)
        if config.group_prefixes:
            dataset = dataset.map_batches(
                sort_by_prompt, fn_args=(settings,), batch_size=None, batch_format="pyarrow", zero_copy_batch=True
            )
        pool = self._started_pool()
        # Twice what the engines hold: a batch stays here until its row on the slowest engine is done, and the others
        # must not run dry meanwhile.
        wanted = math.ceil(2 * pool.capacity / config.batch_size) + _SPARE_CALLS
        # A block is what is handed on when it is finished, so it is no more than one unit of work.
        dataset = dataset.repartition(target_num_rows_per_block=config.batch_size)
        dataset = dataset.map_batches(
            Stage,
            fn_constructor_args=(pool.members, settings, self._tally),
            batch_size=config.batch_size,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ActorPoolStrategy(
                size=1, max_concurrent_calls_per_actor=wanted, max_tasks_in_flight_per_actor=wanted + _SPARE_CALLS
            ),
            # It only waits: a CPU of its own could be the one that reading needs.
            num_cpus=0,
            # It shares the driver's fate, so it lives beside it; a restart elsewhere would only hide the cause.
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        )
        return dataset.map(self._postprocess) if self._postprocess is not None else dataset

    def _look(self, dataset: Dataset) -> RequestSettings:
        config = self._config
        columns = dataset.columns() or []
        if config.id_column is not None and config.id_column not in columns:
            problem = f"is no column of the dataset. Columns there: {', '.join(columns)}"
            raise InputError(describe("id_column", config.id_column, problem, "Name one of these, or leave it out"))
        settings = RequestSettings(
            config=config,
            columns=tuple(columns),
            id_column=config.id_column or identity_column(columns),
            samples=config.n > 1,
        )
        check_columns(columns, ExtraColumns(config, settings.samples).names)
        RequestMaker(settings)  # what it would refuse in the stage is refused here
        return settings

    def _started_pool(self) -> EnginePool:
        if self._pool is None:
            self._pool = EnginePool(self._config.engine, self._config.pool, self._engine_factory)
        return self._pool

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of every engine actor by name; empty before the first call."""
        return self._pool.stats() if self._pool is not None else {}

    def close(self) -> None:
        """End the engines; safe to call twice."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sort_by_prompt(table: pa.Table, settings: RequestSettings) -> pa.Table:
    """The rows of a block in the order of their prompts, so that those that begin alike stand together."""
    # As messages, whose order is that of their text: rendering a chat here would load a tokenizer into every task.
    config = settings.config.replace(chat_template_kwargs={})
    _, made = RequestMaker(dataclasses.replace(settings, config=config)).make(table)
    keys = [repr(requests[0].prompt) if isinstance(requests, list) else "" for requests in made]
    return table.take(sorted(range(len(keys)), key=keys.__getitem__))


def build_pipeline(
    config: BatchConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    *,
    engine_factory: EngineFactory = default_engine,
) -> Pipeline:
    """A pipeline that adds `generated_text`, `finish_reason`, token counts, `rounds` and `error` to every row.

    preprocess: row -> row with a `prompt`, `messages` or `text` column (or what the config names).
    postprocess: row with the outputs -> row. Rows that failed come through it too, with `error` set and outputs None.
    """
    return Pipeline(config, preprocess, postprocess, engine_factory)
