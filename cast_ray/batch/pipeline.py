"""`build_pipeline`: a function from dataset to dataset, in the shape of `ray.data.llm`, for other Ray Data code.

It reads and writes no files; `driver` does that around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cast_ray.batch.columns import READ_ERROR_COLUMN, check_columns, identity_column
from cast_ray.batch.prepare import find_prompt_column
from cast_ray.batch.stage import Stage, StageSettings
from cast_ray.config import BatchConfig
from cast_ray.pool.actor import EngineFactory, default_engine
from cast_ray.pool.pool import EnginePool

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]

# Batches that wait in the stage beyond those the engines hold, so that their queue never runs dry.
_SPARE_CALLS = 2
# Batches in a block. Ray Data runs at most four batches of a block at once.
_BATCHES_A_BLOCK = 4


class Pipeline:
    """`pipeline(dataset)` is the dataset with the output columns. The engines start at the first call and live until
    `close`, or the end of a `with` block; datasets made by it must have been consumed by then."""

    def __init__(
        self,
        config: BatchConfig,
        preprocess: RowFunction | None = None,
        postprocess: RowFunction | None = None,
        engine_factory: EngineFactory = default_engine,
        pool: EnginePool | None = None,
        json_columns: frozenset[str] = frozenset(),
        tally: Any | None = None,
    ) -> None:
        self._config = config
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._engine_factory = engine_factory
        self._pool = pool
        self._json_columns = json_columns
        self._tally = tally

    def __call__(self, dataset: Dataset) -> Dataset:
        """Lazy, like every dataset. Raises InputError for a missing column or one that an output would overwrite."""
        if self._preprocess is not None:
            dataset = dataset.map(self._preprocess)
        config = self._config
        columns = [name for name in dataset.columns() or [] if name != READ_ERROR_COLUMN]
        check_columns(columns)
        settings = StageSettings(
            prompt=find_prompt_column(columns, config.prompt_column, config.messages_column, self._json_columns),
            id_column=identity_column(columns),
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=config.seed,
        )
        pool = self._started_pool()
        wanted = math.ceil(len(pool) * pool.slots / config.batch_size) + _SPARE_CALLS
        dataset = dataset.repartition(target_num_rows_per_block=_BATCHES_A_BLOCK * config.batch_size)
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
