"""What a shard of answers holds, and how it comes about: given prompts, others that the target writes, then answers.

It depends on the shard's number and the settings alone, not on which process fills it, when, or beside which others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams, derive_seed
from cast_ray.training.config import TrainConfig
from cast_ray.training.engines import Ask
from cast_ray.training.files import shard_path
from cast_ray.training.prompts import TrainingPrompt, as_prompt, interleave, opening

SHARD_ROWS = 64
OPENING_TOKENS = 96
# A turn shorter than this asks nothing.
LEAST_CHARACTERS = 12
LONGEST_PROMPT = 1024

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("domain", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("temperature", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Answer:
    """A prompt with its answer, as token ids. The temperature is 0 where it is greedy."""

    name: str
    domain: str
    prompt_ids: list[int]
    token_ids: list[int]
    temperature: float


class Plan:
    """Which prompts each shard has.

    A shard has `own_share` prompts that the target writes and the rest given ones, as long as there are any.
    """

    def __init__(self, config: TrainConfig, given: list[TrainingPrompt]) -> None:
        self._given = interleave(given, config.seed)
        self._given_a_shard = round(SHARD_ROWS * (1 - config.own_share)) if given else 0
        self.held_out = -(-config.held_out // SHARD_ROWS)
        self.total = self.held_out + -(-config.wanted_answers(len(given)) // SHARD_ROWS)

    def given(self, number: int) -> list[TrainingPrompt]:
        """Given prompts of a shard."""
        return self._given[number * self._given_a_shard : (number + 1) * self._given_a_shard]

    def own(self, number: int) -> range:
        """Numbers of the openings from which the target writes the shard's other prompts."""
        first = number * SHARD_ROWS
        return range(first, first + SHARD_ROWS - len(self.given(number)))

    def at_once(self, rows: int) -> int:
        """Shards under way together, where engines hold `rows` rows: none ever waits for the slowest row of a shard."""
        return 1 + -(-2 * rows // SHARD_ROWS)

    def path(self, work: Path, number: int) -> Path:
        return shard_path(work / ("held_out" if number < self.held_out else "answers"), number, ".parquet")


async def fill_shard(config: TrainConfig, plan: Plan, tokenizer: Any, ask: Ask, number: int) -> list[Answer]:
    """The answers of a shard. tokenizer: the target's."""
    prompts = [*plan.given(number), *await _own_prompts(config, ask, tokenizer, plan.own(number))]
    return await _answer(config, ask, prompts)


async def _own_prompts(config: TrainConfig, ask: Ask, tokenizer: Any, numbers: range) -> list[TrainingPrompt]:
    """Prompts that the target writes: a user's turn, sampled from its opening."""
    starts = [opening(tokenizer, config.seed, number) for number in numbers]
    requests = []
    for number, (_, _, tokens) in zip(numbers, starts, strict=True):
        seed = derive_seed(config.seed, "written", number)
        requests.append(RowRequest(f"own-{number}", tokens, SamplingParams(OPENING_TOKENS, temperature=1.0, seed=seed)))
    found: dict[str, TrainingPrompt] = {}
    for number, (domain, text, tokens), written in zip(numbers, starts, await ask(requests), strict=True):
        # A turn that did not end by itself is no question.
        if written is None or written.finish_reason != "stop":
            continue
        before = tokenizer.decode(tokens, skip_special_tokens=True)
        whole = tokenizer.decode([*tokens, *written.token_ids], skip_special_tokens=True)
        text = (text + whole[len(before) :]).strip()
        if len(text) >= LEAST_CHARACTERS:
            found.setdefault(text, TrainingPrompt(f"own-{number}", domain, as_prompt(tokenizer, text)))
    return list(found.values())


async def _answer(config: TrainConfig, ask: Ask, prompts: list[TrainingPrompt]) -> list[Answer]:
    """Answers, without those whose prompt is too long to train on."""
    requests = []
    for item in prompts:
        sampled = derive_seed(config.seed, "sampled", item.name) / 2**63 < config.sampled_share
        params = SamplingParams(
            max_tokens=config.answer_tokens,
            temperature=config.temperature if sampled else 0.0,
            seed=derive_seed(config.seed, "answer", item.name),
        )
        requests.append(RowRequest(item.name, item.prompt, params))
    answers = []
    for item, request, written in zip(prompts, requests, await ask(requests), strict=True):
        if written is not None and len(written.prompt_ids) <= LONGEST_PROMPT:
            temperature = float(request.params.temperature)
            answers.append(Answer(item.name, item.domain, written.prompt_ids, written.token_ids, temperature))
    return answers
