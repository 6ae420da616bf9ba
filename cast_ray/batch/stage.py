"""The stage of a Ray Data pipeline that turns blocks of rows into answered rows.

It is thin: it asks the pool and waits. Many calls run at once in one actor, so an engine never idles on one batch's
slowest row.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pyarrow as pa

from cast_ray.batch.columns import append_outputs
from cast_ray.batch.extras import ExtraColumns, judged
from cast_ray.batch.requests import RequestMaker, RequestSettings
from cast_ray.errors import EngineError
from cast_ray.pool.client import PoolMembers
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.serve.attached import AttachedMembers

# Answers kept for later rows that ask the same; a few hundred megabytes of text at most.
_KEPT_ANSWERS = 100_000

Generate = Callable[[Sequence[RowRequest]], Awaitable[list[RowAnswer]]]


class Stage:
    """Callable class for `Dataset.map_batches` with Arrow tables. tally: an actor told of finished rows, or None."""

    def __init__(
        self, members: PoolMembers | AttachedMembers, settings: RequestSettings, tally: Any | None = None
    ) -> None:
        self._maker = RequestMaker(settings)
        self._samples = settings.samples
        self._extras = ExtraColumns(settings.config, settings.samples)
        client = members.client()
        self._generate: Generate = Once(client.generate) if settings.config.dedupe else client.generate
        self._tally = tally

    async def __call__(self, table: pa.Table) -> pa.Table:
        if self._tally is not None:
            self._tally.arrive.remote(len(table))
        table, made = self._maker.make(table)
        wanted = [request for requests in made if isinstance(requests, list) for request in requests]
        if self._tally is not None:
            self._tally.arrive.remote(len(made))
        try:
            generated = iter(await self._generate(wanted))
        except EngineError as error:
            if self._tally is not None:
                await self._tally.fail.remote(str(error))
            raise
        answers = [
            [judged(next(generated), one.params) for one in requests] if isinstance(requests, list) else [requests]
            for requests in made
        ]
        if self._tally is not None:
            errors = sum(any(answer.error is not None for answer in row) for row in answers)
            tokens = sum(answer.num_generated_tokens or 0 for row in answers for answer in row)
            self._tally.add.remote(len(answers), errors, tokens)
        return self._extras.append(append_outputs(table, answers, self._samples), answers)


class Once:
    """Generates for equal requests once. Answers are kept for later ones, the oldest forgotten first."""

    def __init__(self, generate: Generate, keep: int = _KEPT_ANSWERS) -> None:
        self._generate = generate
        self._keep = keep
        self._answers: OrderedDict[str, asyncio.Future[RowAnswer]] = OrderedDict()

    async def __call__(self, rows: Sequence[RowRequest]) -> list[RowAnswer]:
        loop = asyncio.get_running_loop()
        new: list[tuple[str, RowRequest, asyncio.Future[RowAnswer]]] = []
        waiting = []
        for row in rows:
            key = repr((row.prompt, row.params))
            if key not in self._answers:
                self._answers[key] = loop.create_future()
                new.append((key, row, self._answers[key]))
            waiting.append(self._answers[key])
        while len(self._answers) > self._keep:
            self._answers.popitem(last=False)
        try:
            answers = await self._generate([row for _, row, _ in new]) if new else []
        except Exception as error:
            for key, _, future in new:
                self._answers.pop(key, None)
                future.set_exception(error)
                future.exception()  # looked at here, for there may be nobody else who waits for it
            raise
        for (_, _, future), answer in zip(new, answers, strict=True):
            future.set_result(answer)
        return list(await asyncio.gather(*waiting))
