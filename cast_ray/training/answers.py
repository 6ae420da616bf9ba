"""Step 1: the target answers the prompts, and beside them prompts of its own.

Work is cut into numbered shards. A killed job redoes the shards that are missing, and a larger job goes on behind those
that are there; the first ones are held out. Shards are filled by an engine in this process or, on Ray, by a Ray Data
pipeline over the pool's engine actors (`answers_on_ray`); they are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cast_ray.training.config import TrainConfig
from cast_ray.training.engines import in_order, local_engine, on_ray
from cast_ray.training.files import write_whole
from cast_ray.training.prompts import TrainingPrompt
from cast_ray.training.shards import SCHEMA, Answer, Plan, fill_shard

Report = Callable[[str, int, int], None]  # what, done, of how many


def write_answers(config: TrainConfig, given: list[TrainingPrompt], tokenizer: Any, report: Report) -> None:
    """Fill `WORK/held_out` and `WORK/answers`. tokenizer: the target's."""
    plan = Plan(config, given)
    missing = [number for number in range(plan.total) if not plan.path(config.work_dir, number).exists()]
    done = plan.total - len(missing)

    def keep(number: int, rows: list[dict[str, Any]]) -> None:
        nonlocal done
        table = pa.Table.from_pylist(rows, SCHEMA)
        write_whole(plan.path(config.work_dir, number), lambda part: pq.write_table(table, part))
        done += 1
        report("answers", done, plan.total)

    if not missing:
        return
    if not on_ray(config):
        asyncio.run(_write(config, plan, tokenizer, missing, keep))
        return
    from cast_ray.training.answers_on_ray import shards_on_ray  # Ray: not for a job in one process

    for number, rows in shards_on_ray(config, plan, tokenizer, missing):
        keep(number, rows)


def read_answers(work: Path, folder: str = "answers") -> Iterator[tuple[int, list[Answer]]]:
    """Finished shards, in order: (number, answers)."""
    for path in sorted((work / folder).glob("*.parquet")):
        yield int(path.stem), [Answer(**row) for row in pq.read_table(path).to_pylist()]


async def _write(
    config: TrainConfig,
    plan: Plan,
    tokenizer: Any,
    missing: list[int],
    keep: Callable[[int, list[dict[str, Any]]], None],
) -> None:
    async with local_engine(config) as ask:

        async def write(index: int) -> None:
            answers = await fill_shard(config, plan, tokenizer, ask, missing[index])
            keep(missing[index], [vars(answer) for answer in answers])

        await in_order(len(missing), write, plan.at_once(config.batch_size))
