"""From a block of rows to requests for the engines: a prompt and parameters for each sample of each row, or the row's
error. It sends nothing; `stage` does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cast_ray.batch import openai_batch
from cast_ray.batch.columns import READ_ERROR_COLUMN, read_cells
from cast_ray.batch.prepare import PromptReader
from cast_ray.batch.sampling import SamplingReader, row_params
from cast_ray.config import BatchConfig
from cast_ray.errors import RequestError, describe
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import MOST_SAMPLES, Prompt


@dataclass(frozen=True)
class RequestSettings:
    """What making requests needs. id_column: None where nothing names a row. json_columns: columns of JSON text.

    samples: rows have lists of answers, so a row may ask for as many as it likes.
    """

    config: BatchConfig
    columns: tuple[str, ...]
    id_column: str | None
    json_columns: frozenset[str] = frozenset()
    is_openai: bool = False
    samples: bool = False


class RequestMaker:
    """Makes requests of rows. Raises InputError from the constructor where the columns lack what the settings name."""

    def __init__(self, settings: RequestSettings) -> None:
        config = settings.config
        self._settings = settings
        self._job = {**config.sampling_values(), "n": config.n}
        self._most = MOST_SAMPLES if settings.samples else 1
        self._prompts: PromptReader | None = None
        self._sampling: SamplingReader | None = None
        self._tokenizer: Any = None
        used: Iterable[str] = openai_batch.COLUMNS
        if not settings.is_openai:
            self._prompts = PromptReader(config, settings.columns, settings.json_columns)
            self._sampling = SamplingReader(config, settings.columns, settings.json_columns)
            used = (*self._prompts.columns, *self._sampling.columns)
        self.columns = tuple(dict.fromkeys(used))

    def make(self, table: pa.Table) -> tuple[pa.Table, list[list[RowRequest] | RowAnswer]]:
        """The table without the readers' own column, and for every row its requests, or its error."""
        cells: dict[str, list[Any]] = {}
        unread: list[str | None] = [None] * len(table)
        if READ_ERROR_COLUMN in table.column_names:
            unread = table[READ_ERROR_COLUMN].to_pylist()
            table = table.drop_columns([READ_ERROR_COLUMN])
        id_column = self._settings.id_column
        for name in dict.fromkeys([*self.columns, *([id_column] if id_column else [])]):
            cells[name], problems = read_cells(name, table[name])
            for place, reason in problems.items():
                unread[place] = unread[place] or f"UnreadableRow: {reason}"
        names = cells[id_column] if id_column else [None] * len(table)
        found: list[list[RowRequest] | RowAnswer] = []
        for place, problem in enumerate(unread):
            row = {name: cells[name][place] for name in self.columns}
            found.append(RowAnswer(error=problem) if problem is not None else self.of_row(row, names[place]))
        return table, found

    def of_row(self, row: dict[str, Any], row_id: Any) -> list[RowRequest] | RowAnswer:
        """The requests of one row, given its values in `columns`, or its error."""
        try:
            prompt, own = self._read(row)
        except RequestError as error:
            return RowAnswer.failed("InvalidPrompt", error)
        # Without a name the prompt itself is one: rows with equal prompts then share their sample.
        by_prompt = row_id is None or self._settings.config.dedupe
        try:
            own = own if self._sampling is None else self._sampling.read(row)
            name = repr(prompt) if by_prompt else str(row_id)
            params = row_params(self._job, own, self._settings.config.seed, name, self._most)
        except RequestError as error:
            return RowAnswer.failed("InvalidSampling", error)
        return [RowRequest("" if row_id is None else str(row_id), prompt, one) for one in params]

    def _read(self, row: dict[str, Any]) -> tuple[Prompt, dict[str, Any]]:
        """The prompt, and what an OpenAI body says of the sampling."""
        own: dict[str, Any] = {}
        if self._prompts is None:
            prompt, own = openai_batch.read_request(row)
        else:
            prompt = self._prompts.read(row)
        kwargs = self._settings.config.chat_template_kwargs
        if kwargs and isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = self._rendered(prompt, kwargs)
        return prompt, own

    def _rendered(self, messages: Any, kwargs: dict[str, Any]) -> list[int]:
        """A chat as token ids: engines apply the chat template without arguments."""
        tokenizer = self.tokenizer()
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
            )
        except Exception as error:  # templates are code of the model's own and raise what they like
            problem = f"the chat template refuses them ({error})"
            raise RequestError(describe("messages", messages, problem, "See the template's rules")) from None
        return list(ids)

    def tokenizer(self) -> Any:
        """The target's tokenizer, loaded when it is first asked for. Raises ModelError."""
        if self._tokenizer is None:
            from cast_ray.models.loading import load_tokenizer

            engine = self._settings.config.engine
            self._tokenizer = load_tokenizer(engine.target, trust_remote_code=engine.trust_remote_code)
        return self._tokenizer
