"""The dispatcher answers every row in order, whatever engines do: slow, dying, coming back, or gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cast_ray.errors import EngineError
from cast_ray.pool.dispatch import Dispatcher
from cast_ray.pool.rows import RowAnswer, RowRequest
from cast_ray.request import SamplingParams


class Port:
    """An engine in this process. A row named poison ends it with everything aboard, one named stuck makes it hang."""

    def __init__(self, name: str, slots: int = 4, delay: float = 0.001, lives: int = 100) -> None:
        self.name = name
        self.slots = slots
        self.delay = delay
        self.lives = lives
        self.answered: list[str] = []
        self.aboard = 0
        self.most_aboard = 0
        self.dying: asyncio.Event | None = None
        self.stuck: asyncio.Event | None = None  # the life in which it hangs

    async def ready(self) -> None:
        await asyncio.sleep(0.001)
        if self.lives == 0:
            raise RuntimeError("will not start again")
        self.dying = asyncio.Event()

    async def generate(self, rows: list[RowRequest]) -> list[RowAnswer]:
        assert self.dying is not None
        dying = self.dying
        assert not dying.is_set(), "rows were sent to a dead engine"
        self.aboard += len(rows)
        self.most_aboard = max(self.most_aboard, self.aboard)
        try:
            if any("poison" in row.row_id for row in rows):
                await asyncio.sleep(self.delay / 2)
                self.lives -= 1
                dying.set()
            if any("stuck" in row.row_id for row in rows):
                self.stuck = dying
            for _ in rows:
                timeout = None if self.stuck is dying else self.delay
                await asyncio.wait({asyncio.create_task(dying.wait())}, timeout=timeout)
            if dying.is_set():
                raise ConnectionError(f"{self.name} died")
        finally:
            self.aboard -= len(rows)
        self.answered += [row.row_id for row in rows]
        return [RowAnswer(text=row.row_id, num_generated_tokens=1) for row in rows]

    async def pulse(self) -> int:
        return len(self.answered)

    async def end(self) -> None:
        assert self.dying is not None
        self.lives -= 1
        self.dying.set()


def rows(*names: Any) -> list[RowRequest]:
    return [RowRequest(str(name), "prompt", SamplingParams()) for name in names]


def answer(dispatcher: Dispatcher, *batches: list[RowRequest]) -> list[list[RowAnswer]]:
    async def together() -> list[list[RowAnswer]]:
        return list(await asyncio.gather(*(dispatcher.generate(batch) for batch in batches)))

    return asyncio.run(asyncio.wait_for(together(), timeout=60))


def test_every_row_is_answered_once_and_in_order() -> None:
    ports = [Port("a"), Port("b")]
    batches = [rows(*range(start, start + 10)) for start in range(0, 100, 10)]

    answers = answer(Dispatcher(ports), *batches)

    assert [found.text for batch in answers for found in batch] == [str(index) for index in range(100)]
    assert sorted(map(int, ports[0].answered + ports[1].answered)) == list(range(100))
    assert all(port.answered for port in ports)


def test_an_engine_never_holds_more_rows_than_its_slots() -> None:
    port = Port("a", slots=16)
    answer(Dispatcher([port]), rows(*range(200)))
    assert port.most_aboard == 16


def test_a_poison_row_is_given_up_and_no_other_row_is() -> None:
    ports = [Port("a", slots=16), Port("b", slots=16)]
    (answers,) = answer(Dispatcher(ports, max_deaths=2), rows(*range(20), "poison", *range(20, 60)))
    assert [index for index, found in enumerate(answers) if found.error] == [20]
    assert answers[20].error is not None
    assert answers[20].error.startswith("EngineDied: 2 engines died while they held this row")


def test_several_poison_rows_at_once_are_told_apart_from_their_neighbours() -> None:
    ports = [Port("a", slots=16), Port("b", slots=16)]
    names = [f"poison-{index}" if index % 10 == 3 else index for index in range(60)]
    (answers,) = answer(Dispatcher(ports, max_deaths=2), rows(*names))
    assert [index for index, found in enumerate(answers) if found.error] == list(range(3, 60, 10))


def test_an_engine_that_never_starts_is_left_out() -> None:
    ports = [Port("a", lives=0), Port("b")]
    (answers,) = answer(Dispatcher(ports), rows(*range(20)))
    assert [found.text for found in answers] == [str(index) for index in range(20)]
    assert ports[0].answered == []


def test_when_no_engine_is_left_every_waiting_batch_fails_with_the_causes() -> None:
    dispatcher = Dispatcher([Port("a", lives=1), Port("b", lives=0)])

    async def both() -> list[Any]:
        work = [dispatcher.generate(rows("poison", 1)), dispatcher.generate(rows(*range(2, 50)))]
        return await asyncio.gather(*work, return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(both(), timeout=60))
    assert all(isinstance(error, EngineError) for error in found)
    assert "a: RuntimeError: will not start again; b: RuntimeError: will not start again" in str(found[0])

    with pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(asyncio.wait_for(dispatcher.generate(rows(1)), timeout=60))


def test_the_faster_engine_takes_more_rows() -> None:
    slow, fast = Port("slow", delay=0.02), Port("fast", delay=0.002)
    answer(Dispatcher([slow, fast]), rows(*range(200)))
    assert len(fast.answered) > 2 * len(slow.answered)


def test_a_row_that_rode_with_two_poison_rows_is_still_answered() -> None:
    port = Port("a", slots=4)
    (answers,) = answer(Dispatcher([port], max_deaths=3), rows("poison-0", 1, 2, "poison-3", *range(4, 40)))
    assert [index for index, found in enumerate(answers) if found.error] == [0, 3]


def test_the_engine_that_is_ready_first_does_not_take_all_of_a_few_rows() -> None:
    ports = [Port("a", slots=16), Port("b", slots=16)]
    answer(Dispatcher(ports), rows(*range(16)))
    assert [len(port.answered) for port in ports] == [8, 8]


def test_a_row_that_makes_engines_hang_is_given_up_and_no_other_row_is() -> None:
    ports = [Port("a", slots=8), Port("b", slots=8)]
    dispatcher = Dispatcher(ports, max_deaths=2, hang_timeout_s=0.2)
    (answers,) = answer(dispatcher, rows(*range(10), "stuck", *range(10, 40)))
    assert [index for index, found in enumerate(answers) if found.error] == [10]
    assert answers[10].error is not None
    assert "the last: made no progress for 0.2 s" in answers[10].error


def test_an_engine_that_works_slowly_or_idles_does_not_hang() -> None:
    port = Port("a", slots=2, delay=0.15)

    async def with_a_pause() -> None:
        dispatcher = Dispatcher([port], hang_timeout_s=0.4)
        for _ in range(2):
            await dispatcher.generate(rows(*range(4)))
            await asyncio.sleep(0.6)

    asyncio.run(with_a_pause())
    assert port.lives == 100
    assert len(port.answered) == 8
