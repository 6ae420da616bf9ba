"""The engines that write training data: rows of prompts in, token ids out, in this process or on Ray.

The pool carries text; what training needs is the very tokens, so this engine spells both prompt and answer as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from cast_ray.config import EngineConfig
from cast_ray.engine.async_engine import AsyncEngine
from cast_ray.pool.actor import EngineActor
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import Completion, Prompt, SamplingParams
from cast_ray.training.config import TrainConfig


@dataclass(frozen=True)
class Written:
    """What the target wrote: token ids of prompt and answer (its end token included), and how it ended."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str


# Answers in the order of the rows; None for a row that cannot be answered, such as a prompt beyond the context.
Ask = Callable[[list[RowRequest]], Awaitable[list[Written | None]]]


class TokenEngine:
    """An engine whose answers' text is token ids."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = AsyncEngine(config)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str) -> Completion:
        tokens = self._engine.render(prompt)
        completion = await self._engine.generate(tokens, params, request_id=request_id)
        return replace(completion, text=json.dumps([tokens, completion.token_ids]))

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    def close(self) -> None:
        self._engine.close()


def on_ray(config: TrainConfig) -> bool:
    """Whether answers are written by actors on Ray: where replicas are asked for, or a cluster is named."""
    return config.replicas is not None or bool(os.environ.get("RAY_ADDRESS"))


def writing_engine(config: TrainConfig) -> EngineConfig:
    """Engines that answer have no drafter: there is none yet, and batches keep a device busy by themselves."""
    return EngineConfig(
        target=config.target,
        drafter="none",
        width="ar",
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_batch_size=config.batch_size,
    )


@asynccontextmanager
async def local_engine(config: TrainConfig) -> AsyncIterator[Ask]:
    """An engine in this process."""
    actor = EngineActor("engine-0", writing_engine(config), TokenEngine)
    try:
        yield asking(actor.generate_batch)
    finally:
        await actor.close()


def asking(generate: Callable[[list[RowRequest]], Awaitable[list[RowAnswer]]]) -> Ask:
    """`generate` of an engine or a pool of `TokenEngine`s, with token ids for text."""

    async def ask(rows: list[RowRequest]) -> list[Written | None]:
        return [_written(answer) for answer in await generate(rows)]

    return ask


def _written(answer: RowAnswer) -> Written | None:
    if answer.error is not None or answer.text is None:
        logging.getLogger(__name__).warning("left out: %s", answer.error)
        return None
    prompt_ids, token_ids = json.loads(answer.text)
    return Written(prompt_ids, token_ids, str(answer.finish_reason))


async def in_order(count: int, work: Callable[[int], Awaitable[None]], at_once: int) -> None:
    """Run work(0..count-1), begun in order and `at_once` at a time, so that engines never wait for a slow row."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            await work(number)

    await asyncio.gather(*(one(number) for number in range(count)))
