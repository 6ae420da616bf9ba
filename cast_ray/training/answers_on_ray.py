"""Shards of answers from a Ray Data pipeline: numbers in, shards out, engine actors of the pool between.

As in a batch job the stage only asks and waits, many shards at a time, so that no engine idles on a shard's slowest
row. It writes no files: shards come back to this process as they are finished, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cast_ray.batch.session import quiet_ray_data
from cast_ray.config import PoolConfig
from cast_ray.errors import EngineError
from cast_ray.pool.client import PoolMembers
from cast_ray.pool.cluster import ray_cluster
from cast_ray.pool.pool import EnginePool
from cast_ray.training.config import TrainConfig
from cast_ray.training.engines import TokenEngine, asking, writing_engine
from cast_ray.training.shards import SCHEMA, Plan, fill_shard

_SHARD = pa.schema([("number", pa.int64()), ("answers", pa.list_(pa.struct(SCHEMA))), ("failure", pa.string())])


class ShardStage:
    """Callable class for `Dataset.map_batches`: one row, a shard's number, becomes one row, the shard."""

    def __init__(self, config: TrainConfig, plan: Plan, tokenizer: Any, members: PoolMembers) -> None:
        self._config, self._plan, self._tokenizer = config, plan, tokenizer
        self._ask = asking(members.client().generate)

    async def __call__(self, table: pa.Table) -> pa.Table:
        (number,) = table["number"].to_pylist()
        row: dict[str, Any] = {"number": number, "answers": [], "failure": None}
        try:
            answers = await fill_shard(self._config, self._plan, self._tokenizer, self._ask, number)
            row["answers"] = [vars(answer) for answer in answers]
        except EngineError as error:  # as a value: Ray Data passes on only a traceback's text
            row["failure"] = str(error)
        return pa.Table.from_pylist([row], _SHARD)


def shards_on_ray(
    config: TrainConfig, plan: Plan, tokenizer: Any, numbers: list[int]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The shards of these numbers, each with its answers as plain values, as they are finished.

    On the cluster that this process is connected to or RAY_ADDRESS names, else on one of its own. Raises EngineError
    where no engine is left.
    """
    with ray_cluster(), EnginePool(writing_engine(config), PoolConfig(replicas=config.replicas), TokenEngine) as pool:
        wanted = plan.at_once(pool.capacity)
        dataset = ray.data.from_items([{"number": number} for number in numbers], override_num_blocks=len(numbers))
        dataset = dataset.map_batches(
            ShardStage,
            fn_constructor_args=(config, plan, tokenizer, pool.members),
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                size=1, max_concurrent_calls_per_actor=wanted, max_tasks_in_flight_per_actor=wanted
            ),
            # It only waits, and shares the fate of this process, so it lives beside it.
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        )
        with quiet_ray_data():
            for row in dataset.iter_rows():
                if row["failure"] is not None:
                    raise EngineError(row["failure"])
                yield row["number"], row["answers"]
