"""The stage of a Ray Data pipeline that turns blocks of rows into answered rows.

It is thin: it asks the pool and waits. Many calls run at once in one actor, so an engine never idles on one batch's
slowest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cast_ray.batch.columns import READ_ERROR_COLUMN, append_outputs, read_cells
from cast_ray.batch.prepare import PromptColumn, read_prompt
from cast_ray.errors import EngineError, RequestError
from cast_ray.pool.client import PoolClient, PoolMembers
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import SamplingParams, derive_seed


@dataclass(frozen=True)
class StageSettings:
    """What the stage needs of a job's settings. id_column: None where nothing names a row."""

    prompt: PromptColumn
    id_column: str | None
    max_tokens: int
    temperature: float
    seed: int


class Stage:
    """Callable class for `Dataset.map_batches` with Arrow tables. tally: an actor told of finished rows, or None."""

    def __init__(self, members: PoolMembers, settings: StageSettings, tally: Any | None = None) -> None:
        self._settings = settings
        self._client = PoolClient(members)
        self._tally = tally

    async def __call__(self, table: pa.Table) -> pa.Table:
        table, requests = prepare(table, self._settings)
        wanted = [request for request in requests if isinstance(request, RowRequest)]
        try:
            generated = iter(await self._client.generate(wanted))
        except EngineError as error:
            if self._tally is not None:
                await self._tally.fail.remote(str(error))
            raise
        answers = [next(generated) if isinstance(request, RowRequest) else request for request in requests]
        if self._tally is not None:
            errors = sum(answer.error is not None for answer in answers)
            tokens = sum(answer.num_generated_tokens or 0 for answer in answers)
            self._tally.add.remote(len(answers), errors, tokens)
        return append_outputs(table, answers)


def prepare(table: pa.Table, settings: StageSettings) -> tuple[pa.Table, list[RowRequest | RowAnswer]]:
    """The table without the readers' own column, and for every row a request, or its error where it cannot be one."""
    prompts, bad_prompts = read_cells(settings.prompt.name, table[settings.prompt.name])
    ids: list[Any] = [None] * len(table)
    bad_ids: dict[int, str] = {}
    if settings.id_column:
        ids, bad_ids = read_cells(settings.id_column, table[settings.id_column])
    unread: list[str | None] = [None] * len(table)
    if READ_ERROR_COLUMN in table.column_names:
        unread = table[READ_ERROR_COLUMN].to_pylist()
        table = table.drop_columns([READ_ERROR_COLUMN])
    for row, problem in {**bad_ids, **bad_prompts}.items():
        unread[row] = unread[row] or problem
    rows = zip(prompts, ids, unread, strict=True)
    return table, [_request(prompt, row_id, problem, settings) for prompt, row_id, problem in rows]


def _request(prompt: Any, row_id: Any, problem: str | None, settings: StageSettings) -> RowRequest | RowAnswer:
    if problem is not None:
        return RowAnswer.failed("UnreadableRow", problem)
    # Without a name the prompt itself is one: rows with equal prompts then share their sample, wherever they stand.
    name = str(row_id) if row_id is not None else repr(prompt)
    seed = derive_seed(settings.seed, name) if settings.temperature > 0 else None
    try:
        params = SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=seed)
        return RowRequest(name if row_id is not None else "", read_prompt(prompt, settings.prompt), params)
    except RequestError as error:
        return RowAnswer.failed("InvalidPrompt", error)
