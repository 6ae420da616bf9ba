"""A row's failure stays its own, and an engine's death does not pass for one."""

from __future__ import annotations

import asyncio

import pytest

from cast_ray.config import EngineConfig
from cast_ray.errors import EngineError, ModelError
from cast_ray.pool.actor import EngineActor
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import SamplingParams
from tests.fake_engine import FakeEngine


def generate(*prompts: str, target: str = "embedded") -> list[RowAnswer]:
    async def run() -> list[RowAnswer]:
        actor = EngineActor("engine-0", EngineConfig(target=target), FakeEngine)
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
