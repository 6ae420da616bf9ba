"""Finished outputs travel between engines: once, to all others, bounded, and past those that fail."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from cast_ray.config import EngineConfig
from cast_ray.engine.async_engine import AsyncEngine
from cast_ray.engine.engine import Engine
from cast_ray.pool.actor import EngineActor
from cast_ray.pool.exchange import MOST_WAITING, Exchange, Output
from cast_ray.request import SamplingParams
from tests.fake_engine import FakeEngine
from tests.support import qwen3, save_tiny_model


class Member:
    """An engine's side: what it got, and what it will give."""

    def __init__(self) -> None:
        self.got: list[Output] = []
        self.fresh: list[Output] = []
        self.ill = False

    def __call__(self, others: list[Output]) -> list[Output]:
        if self.ill:
            raise RuntimeError("dead")
        self.got += others
        fresh, self.fresh = self.fresh, []
        return fresh


@pytest.fixture
def exchange() -> Exchange:
    """One whose rounds are asked for by hand."""
    idle = Exchange(dict, period_s=3600.0)
    idle.close()
    return idle


def output(number: int, length: int = 3) -> Output:
    return ("job", (1, 2), (number,) * length)


def test_every_output_reaches_every_other_engine_once(exchange: Exchange) -> None:
    members = {name: Member() for name in "abc"}
    members["a"].fresh = [output(1)]
    members["b"].fresh = [output(2)]
    for _ in range(3):
        exchange.round(members)
    assert members["a"].got == [output(2)]
    assert members["b"].got == [output(1)]
    assert sorted(members["c"].got) == [output(1), output(2)]


def test_an_engine_that_is_ill_misses_nothing_but_what_is_too_old(exchange: Exchange) -> None:
    members = {name: Member() for name in "ab"}
    members["b"].ill = True
    for number in range(40):
        members["a"].fresh = [output(number, 1000)]
        exchange.round(members)
    members["b"].ill = False
    exchange.round(members)
    assert 0 < len(members["b"].got) <= MOST_WAITING // 1000
    assert members["b"].got[-1] == output(39, 1000)
    del members["b"]
    exchange.round(members)
    assert list(exchange._waiting) == ["a"]


def test_rounds_go_on_by_themselves_until_it_is_closed() -> None:
    met = threading.Event()
    member = Member()

    def meet(others: list[Output]) -> list[Output]:
        met.set()
        return member(others)

    running = Exchange(lambda: {"a": meet}, period_s=0.01)
    assert met.wait(5)
    running.close()
    running._thread.join(5)
    assert not running._thread.is_alive()


def test_a_row_of_one_engine_is_looked_up_by_another(exchange: Exchange, tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path, qwen3(), spread=2.0)
    config = EngineConfig(target=str(target), drafter="lookup", width="fixed:15", dtype="float32", lookup_tokens=4096)
    first, second = Engine(config), Engine(config)
    params, prompt = SamplingParams(max_tokens=40), [3, 1, 4, 1, 5]
    plain = first.generate([prompt], params)[0]
    for _ in range(2):
        exchange.round({"first": first.exchange_outputs, "second": second.exchange_outputs})
    out = second.generate([prompt], params)[0]
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_by_source["rows"] > 20
    assert second.stats()["lookup"]["outputs_kept"] == 2


def test_an_actor_hands_on_what_its_engine_has_and_nothing_for_one_that_looks_nothing_up(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path, qwen3(), spread=2.0)
    config = EngineConfig(target=str(target), drafter="lookup", width="fixed:7", dtype="float32", lookup_tokens=4096)

    async def go() -> tuple[list[Output], list[Output]]:
        actor = EngineActor("a", config, lambda c: AsyncEngine(c, lookup_scope="job"))
        assert await actor.exchange([]) == []
        await actor.ready()
        assert actor._engine is not None
        await actor._engine.generate([1, 2, 3], SamplingParams(max_tokens=8), request_id="r")
        own = await actor.exchange([output(5)])
        await actor.close()
        fake = EngineActor("b", config, FakeEngine)
        await fake.ready()
        return own, await fake.exchange([output(1)])

    own, of_fake = asyncio.run(go())
    assert len(own) == 1
    assert own[0][0].startswith("job")
    assert len(own[0][2]) == 8
    assert of_fake == []


def test_a_pool_that_cannot_name_its_engines_once_is_asked_again() -> None:
    asked = threading.Event()
    calls: list[int] = []

    def ports() -> dict[str, Member]:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("the members change")
        asked.set()
        return {}

    exchange = Exchange(ports, period_s=0.01)
    try:
        assert asked.wait(30)
    finally:
        exchange.close()
