"""The async front: deltas add up to the completion, slow consumers hold nobody up, failures stay where they belong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.engine.async_engine import AsyncEngine
from cast_ray.engine.streams import Delta, Stream
from cast_ray.errors import EngineError, QueueFullError, RequestError
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PARAMS = SamplingParams(max_tokens=40, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    config = qwen3()
    save_tiny_model(folder / "target", config, spread=2.0)
    save_tiny_drafter(folder / "drafter", target=config)
    return {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "width": "fixed:7",
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_batch_size": 3,
        "max_nodes": 7,
    }


# Without graphs what a round brought is told at once, with them while the next is computed.
@pytest.fixture(params=["off", "on"])
def front(settings: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(**settings, graphs=request.param, graph_seconds=0.0))
    yield engine
    engine.close()


async def collect(front: AsyncEngine, prompt: list[int], **options: Any) -> list[Delta]:
    return [delta async for delta in front.stream(prompt, PARAMS, **options)]


def test_deltas_add_up_to_the_completion(settings: dict[str, Any], front: AsyncEngine) -> None:
    prompts = [[i, 3, i] for i in range(8)]
    expected = Engine(EngineConfig(**settings)).generate(prompts, PARAMS)

    async def run() -> list[list[Delta]]:
        return await asyncio.gather(*(collect(front, p, request_id=f"r{i}") for i, p in enumerate(prompts)))

    for number, (deltas, out) in enumerate(zip(asyncio.run(run()), expected, strict=True)):
        assert {delta.request_id for delta in deltas} == {f"r{number}"}
        assert [token for delta in deltas for token in delta.token_ids] == out.token_ids
        assert "".join(delta.text for delta in deltas) == out.text
        assert [delta.completion is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        completion = deltas[-1].completion
        assert completion is not None
        assert (completion.text, completion.token_ids) == (out.text, out.token_ids)
        assert len(deltas) > 3


def test_rounds_are_shown_to_those_who_ask(front: AsyncEngine) -> None:
    async def run() -> list[list[Delta]]:
        asks = ({"traced": True}, {}, {"traced": True})
        return await asyncio.gather(*(collect(front, [i, 3, i], **options) for i, options in enumerate(asks)))

    first, quiet, last = asyncio.run(run())
    assert not any(delta.traces for delta in quiet)
    for deltas in (first, last):
        completion = deltas[-1].completion
        assert completion is not None
        traces = [trace for delta in deltas for trace in delta.traces]
        assert len(traces) == sum(delta.rounds for delta in deltas) == completion.stats.rounds
        assert [token for trace in traces for token in trace.committed] == completion.token_ids
        assert sum(len(trace.tokens) for trace in traces) == completion.stats.nodes_verified > 0
        for trace in traces:
            path = [trace.tokens[node] for node in trace.accepted]
            assert trace.committed[: len(path)] == path[: len(trace.committed)]
            assert [trace.parents[node] for node in trace.accepted] == [-1, *trace.accepted][: len(path)]


def test_a_slow_consumer_holds_nobody_up_and_loses_nothing(front: AsyncEngine) -> None:
    async def run() -> None:
        slow = front.stream([1, 2, 3], PARAMS)
        first = await anext(slow)
        # While this one looks away, the engine goes on with it and with others.
        others = await asyncio.gather(*(front.generate([5, i], PARAMS) for i in range(4)))
        assert all(len(out.token_ids) == 40 for out in others)
        rest = [delta async for delta in slow]
        assert len(rest) == 1, "everything that came meanwhile is one delta"
        assert rest[0].completion is not None
        assert first.token_ids + rest[0].token_ids == rest[0].completion.token_ids
        assert first.text + rest[0].text == rest[0].completion.text

    asyncio.run(run())


def test_a_consumer_that_leaves_aborts_its_request(front: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=400)

    async def leave_by_closing() -> None:
        deltas = front.stream([1, 2], params)
        await anext(deltas)
        await deltas.aclose()

    async def leave_by_cancelling() -> None:
        async def read() -> None:
            async for _ in front.stream([1, 3], params):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave_by_closing())
    asyncio.run(leave_by_cancelling())
    stats = front.stats()
    assert stats["finish_reasons"] == {"abort": 2}
    assert (stats["running"], stats["waiting"], stats["kv_pages_free"]) == (0, 0, stats["kv_pages"])


def test_a_consumer_whose_event_loop_is_gone_harms_nobody(front: AsyncEngine) -> None:
    loop = asyncio.new_event_loop()
    deltas = front.stream([1, 2], SamplingParams(max_tokens=200))
    loop.run_until_complete(anext(deltas))
    loop.close()
    out = asyncio.run(front.generate([4, 4], PARAMS))
    assert len(out.token_ids) == 40
    assert front.healthy


def test_a_bad_request_is_refused_alone(front: AsyncEngine) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(
            collect(front, [99]), collect(front, [1, 2]), front.generate([], PARAMS), return_exceptions=True
        )

    unknown, good, empty = asyncio.run(run())
    assert isinstance(unknown, RequestError)
    assert isinstance(empty, RequestError)
    assert good[-1].completion is not None


def test_an_id_in_use_is_refused_and_its_owner_goes_on(front: AsyncEngine) -> None:
    async def run() -> None:
        first = front.stream([1, 2], PARAMS, request_id="same")
        await anext(first)
        with pytest.raises(RequestError, match=r"request_id='same': is in use\. Give each request its own"):
            await front.generate([3, 4], PARAMS, "same")
        rest = [delta async for delta in first]
        assert rest[-1].completion is not None
        assert rest[-1].completion.finish_reason == "length"

    asyncio.run(run())


def test_a_full_queue_refuses_with_the_remedy(settings: dict[str, Any]) -> None:
    engine = Engine(EngineConfig(**settings, max_waiting=2))
    for number in range(2):
        engine.submit(f"r{number}", [1, number], PARAMS)
    with pytest.raises(QueueFullError, match=r"max_waiting=2: 2 requests wait already\. Send it again"):
        engine.submit("r2", [1, 2], PARAMS)
    engine.step()
    engine.submit("r2", [1, 2], PARAMS)
    while engine.has_work:
        engine.step()
    assert engine.stats()["requests_finished"] == 3
    # A list longer than the queue is fed into it bit by bit.
    assert len(engine.generate([[i] for i in range(9)], SamplingParams(max_tokens=3))) == 9


def test_a_failing_loop_fails_streams_with_its_cause(front: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(deliver: Any) -> None:
        raise ValueError("the device fell off")

    async def run() -> list[Any]:
        reading = [asyncio.create_task(collect(front, [1, i])) for i in range(4)]
        await asyncio.sleep(0)
        monkeypatch.setattr(front._engine, "advance", break_down)
        return await asyncio.gather(*reading, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, EngineError)
        assert "ValueError: the device fell off" in str(error)
    assert not front.healthy


def test_who_had_ended_before_the_engine_failed_is_told_so(front: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = front._engine.advance

    def fails_after_an_end(deliver: Any) -> None:
        advance(deliver)
        if any(s.row >= 0 for s in front._engine._scheduler.running) and front._engine._scheduler.find("short") is None:
            raise ValueError("the device fell off")

    async def run() -> list[Any]:
        short = SamplingParams(max_tokens=2, ignore_eos=True)
        long = SamplingParams(max_tokens=300, ignore_eos=True)
        asked = (front.generate([1, 2], short, "short"), front.generate([3], long, "long"))
        reading = [asyncio.create_task(one) for one in asked]
        while front._engine._scheduler.find("long") is None or front._engine._scheduler.find("short") is None:
            await asyncio.sleep(0)
        monkeypatch.setattr(front._engine, "advance", fails_after_an_end)
        return await asyncio.gather(*reading, return_exceptions=True)

    short, long = asyncio.run(run())
    assert len(short.token_ids) == 2
    assert "the device fell off" in str(long)


def test_an_idle_loop_checks_its_pages(front: AsyncEngine) -> None:
    pool = front._engine._scheduler.pool
    asyncio.run(front.generate([1, 2], PARAMS))
    pool._references[0] += 1  # somebody lost a page
    with pytest.raises(EngineError, match="lost or owned wrongly"):
        asyncio.run(generate_twice(front))
    assert not front.healthy


async def generate_twice(front: AsyncEngine) -> None:
    """The loop checks when it runs empty: after the first of them, if not before."""
    await front.generate([1, 2], PARAMS)
    await asyncio.sleep(0.1)
    await front.generate([1, 2], PARAMS)


def test_a_stream_merges_what_nobody_has_looked_at() -> None:
    async def run() -> None:
        stream = Stream("r", every_delta=True)
        assert stream.add([1], "a", None)
        assert not stream.add([2, 3], "bc", None)
        stream.wake_here()
        assert await stream.next() == Delta("r", [1, 2, 3], "abc", rounds=2)
        assert stream.add([4], "d", None)

    asyncio.run(run())
