"""How near a pool of unlike engines comes to the sum of their rates, beside plain `map_batches` of fixed batches.

    python benchmarks/cluster_scale.py --actors 12 --rows 2000 --seconds 20

The engines wait instead of computing: a third each of speed 1, 2 and 4, `--batch` rows at once, so that one machine can
play a cluster. Everything else is real: Ray, the pipeline, the dispatcher, one process an engine. The bound is the time
in which all engines, each at its full rate, would have done all rows; the speeds are chosen so that it is `--seconds`.
The time is that from the first row that an engine begins to the last that one ends, so start-up is not counted on
either side. The plain way is an actor pool of as many actors with the same engines, and
batches of as many rows as an engine decodes at once, four batches a block and two blocks in flight an actor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
from collections import Counter
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset

from cast_ray.batch.pipeline import build_pipeline
from cast_ray.config import BatchConfig, EngineConfig
from cast_ray.request import Completion, Prompt, RequestStats, SamplingParams

WORDS = 20
SPEEDS = (1, 2, 4)


class WaitingEngine:
    """Decodes `max_batch_size` rows at once. A row takes `kv_cache_tokens` milliseconds (the setting is put to this
    use, since a pool's groups differ in engine settings)."""

    def __init__(self, config: EngineConfig) -> None:
        self._places = asyncio.Semaphore(config.max_batch_size)
        self._row_s = (config.kv_cache_tokens or 0) / 1000
        self.healthy = True
        self.finished = 0
        self.began: float | None = None
        self.ended = 0.0

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Completion:
        self.began = self.began or time.time()
        async with self._places:
            await asyncio.sleep(self._row_s)
        self.finished += 1
        self.ended = time.time()
        stats = RequestStats(rounds=WORDS // 2, tokens_committed=WORDS)
        return Completion(request_id or "", str(prompt).upper(), list(range(WORDS)), "stop", WORDS, None, stats)

    def stats(self) -> dict[str, Any]:
        return {"steps": self.finished, "began": self.began, "ended": self.ended}

    def close(self) -> None:
        self.healthy = False


class PlainActor:
    """One engine of plain `map_batches`: it takes the next speed, and holds a batch until its slowest row is done."""

    def __init__(self, batch: int, row_ms: list[int], numbers: Any) -> None:
        self._number = ray.get(numbers.take.remote())
        self._engine = WaitingEngine(EngineConfig(max_batch_size=batch, kv_cache_tokens=row_ms[self._number]))

    async def __call__(self, table: dict[str, Any]) -> dict[str, Any]:
        done = await asyncio.gather(*(self._engine.generate(str(p), SamplingParams()) for p in table["prompt"]))
        return {
            "generated_text": [found.text for found in done],
            "engine": [self._number] * len(done),
            "began": [self._engine.began] * len(done),
            "ended": [self._engine.ended] * len(done),
        }


@ray.remote(num_cpus=0)
class Numbers:
    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        self._next += 1
        return self._next - 1


def row_times(actors: int, rows: int, batch: int, seconds: float) -> list[int]:
    """Milliseconds that a row takes on each engine, so that all rows at full rates take `seconds`."""
    speeds = [SPEEDS[i % len(SPEEDS)] for i in range(actors)]
    unit = rows / seconds / sum(speeds)  # rows a second of an engine of speed 1
    return [round(1000 * batch / (unit * speed)) for speed in speeds]


def bound(row_ms: list[int], rows: int, batch: int) -> float:
    """Seconds for all rows at the sum of the rates."""
    return rows / sum(1000 * batch / ms for ms in row_ms)


def dataset(rows: int, rows_a_block: int) -> Dataset:
    return ray.data.from_items(
        [{"id": i, "prompt": f"row number {i}"} for i in range(rows)], override_num_blocks=-(-rows // rows_a_block)
    )


def run_pool(row_ms: list[int], rows: int, batch: int) -> tuple[float, Counter[int]]:
    """(seconds, rows by speed)."""
    groups = [
        {"name": f"speed-{speed}", "count": len(row_ms[place :: len(SPEEDS)]), "engine": {"kv_cache_tokens": ms}}
        for place, (speed, ms) in enumerate(zip(SPEEDS, row_ms, strict=False))
    ]
    config = BatchConfig(
        engine=EngineConfig(max_batch_size=batch), pool={"groups": groups}, prompt_column="prompt", batch_size=16
    )
    with build_pipeline(config, engine_factory=WaitingEngine) as pipeline:
        texts = {row["generated_text"] for row in pipeline(dataset(rows, 250)).iter_rows()}
        actors = pipeline.stats()
    assert len(texts) == rows
    shares: Counter[int] = Counter()
    for name, about in actors.items():
        shares[int(name.split("-")[1])] += about["rows"]["answered"]
    busy = [about["engine"] for about in actors.values() if about["engine"]["began"] is not None]
    return max(one["ended"] for one in busy) - min(one["began"] for one in busy), shares


def run_plain(row_ms: list[int], rows: int, batch: int) -> tuple[float, Counter[int]]:
    """(seconds, rows by speed)."""
    # Or the first actors would have done most of the rows when the last one starts.
    ray.data.DataContext.get_current().wait_for_min_actors_s = 600
    # A block goes to one actor whole, so blocks are small too.
    answered = dataset(rows, 4 * batch).map_batches(
        PlainActor,
        fn_constructor_args=(batch, row_ms, Numbers.remote()),
        batch_size=batch,
        num_cpus=0,
        compute=ActorPoolStrategy(size=len(row_ms), max_tasks_in_flight_per_actor=2),
    )
    found = list(answered.iter_rows())
    assert len({row["generated_text"] for row in found}) == rows
    seconds = max(row["ended"] for row in found) - min(row["began"] for row in found)
    return seconds, Counter(SPEEDS[row["engine"] % len(SPEEDS)] for row in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=12)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help="rows that an engine decodes at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="the bound: all rows at the sum of the rates")
    parser.add_argument("--skip-plain", action="store_true")
    options = parser.parse_args()

    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    row_ms = row_times(options.actors, options.rows, options.batch, options.seconds)
    least = bound(row_ms, options.rows, options.batch)
    ways = {"pool": run_pool} if options.skip_plain else {"pool": run_pool, "map_batches": run_plain}
    for name, way in ways.items():
        seconds, shares = way(row_ms, options.rows, options.batch)
        print(
            json.dumps(
                {
                    "way": name,
                    "actors": options.actors,
                    "rows": options.rows,
                    "bound_s": round(least, 2),
                    "seconds": round(seconds, 2),
                    "over_bound": round(seconds / least - 1, 4),
                    "share_by_speed": {speed: round(shares[speed] / options.rows, 4) for speed in SPEEDS},
                }
            ),
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
