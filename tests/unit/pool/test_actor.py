"""A row's failure stays its own, and an engine's death does not pass for one."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cast_ray.config import EngineConfig
from cast_ray.errors import EngineError, ModelError, QueueFullError
from cast_ray.pool.actor import EngineActor, EngineFactory
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import Completion, Prompt, SamplingParams
from tests.fake_engine import FakeEngine


def generate(*prompts: str, target: str = "embedded", engine: EngineFactory = FakeEngine) -> list[RowAnswer]:
    async def run() -> list[RowAnswer]:
        actor = EngineActor("engine-0", EngineConfig(target=target), engine)
        return await actor.generate_batch([RowRequest("same id", prompt, SamplingParams()) for prompt in prompts])

    return asyncio.run(run())


def test_answers_come_in_order_and_bad_rows_carry_their_error() -> None:
    first, refused, odd, last = generate("one two", "reject", "strange", "three")
    assert first == RowAnswer("ONE TWO", "stop", 7, 2, 1)
    assert refused.error == "RequestError: prompt=9000: is longer than the context of 8192. Shorten it"
    assert odd.error == "KeyError: 'strange'"
    assert odd.text is None
    assert last.text == "THREE"


def test_a_dead_engine_is_an_exception_of_the_call() -> None:
    with pytest.raises(EngineError, match="the engine of engine-0 died"):
        generate("fine", "break")


def test_an_engine_that_cannot_load_raises_its_own_error() -> None:
    with pytest.raises(ModelError, match="does not exist"):
        generate("fine", target="missing")


class FullAtFirst(FakeEngine):
    """Refuses every row twice, as an engine does whose queue is full."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.refused: Counter[str] = Counter()

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Completion:
        self.refused[str(prompt)] += 1
        if self.refused[str(prompt)] <= 2:
            raise QueueFullError("max_waiting=1: so many requests wait already. Send it again later")
        return await super().generate(prompt, params, request_id)


class GivesUp(FakeEngine):
    """Ends every request as the engine does where it cannot go on with it."""

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Completion:
        done = await super().generate(prompt, params, request_id)
        return replace(done, finish_reason="error", stop_reason="no token is allowed here")


def test_a_full_queue_is_waited_for_and_is_no_error_of_a_row() -> None:
    answers = generate("one", "reject", "two", engine=FullAtFirst)
    assert [answer.text for answer in answers] == ["ONE", None, "TWO"]
    assert answers[1].error is not None
    assert "longer than the context" in answers[1].error


def test_a_request_that_the_engine_gave_up_is_a_row_with_an_error() -> None:
    (answer,) = generate("fine", engine=GivesUp)
    assert answer == RowAnswer(error="GenerationError: no token is allowed here")
