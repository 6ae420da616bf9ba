"""Engines of unlike speeds are all busy to the end, and each takes the share of the rows that its speed is of all."""

from __future__ import annotations

import random

import pytest

from cast_ray.pool.dispatch import Dispatcher
from tests.unit.pool.simulated_engines import Device, row, run

ROWS = 2000
TOKENS = 20


def devices(count: int, batch: int) -> list[Device]:
    """A third each of speed 1, 2 and 4, in units of 100 tokens a second."""
    return [Device(f"{i}", 100.0 * 2 ** (i % 3), batch, batch + max(2, batch // 4)) for i in range(count)]


def bound(engines: list[Device], tokens: int) -> float:
    """Seconds of work without any loss: all tokens over the sum of the rates."""
    return tokens / sum(engine.batch / engine.round_s for engine in engines)


@pytest.mark.parametrize("count", [12, 64])
def test_twelve_and_sixty_four_engines_come_within_eight_percent_of_the_sum_of_their_rates(count: int) -> None:
    engines = devices(count, batch=4)
    work = ROWS if count == 12 else 5 * ROWS
    dispatcher = Dispatcher(engines, hang_timeout_s=60)
    answers, seconds = run(dispatcher.generate([row(i, TOKENS) for i in range(work)]))
    assert [answer.text for answer in answers] == [str(i) for i in range(work)]
    assert seconds <= 1.08 * bound(engines, work * TOKENS)
    total = sum(engine.batch / engine.round_s for engine in engines)
    for engine in engines:
        share = engine.batch / engine.round_s / total
        assert engine.answered / work == pytest.approx(share, rel=0.15, abs=2 / work)


def test_the_tail_of_rows_of_unlike_lengths_is_one_row_long() -> None:
    lengths = random.Random(0).choices([2, 10, 20, 60], k=ROWS)
    engines = devices(12, batch=4)
    _, seconds = run(Dispatcher(engines).generate([row(i, tokens) for i, tokens in enumerate(lengths)]))
    longest = max(lengths) * max(engine.round_s for engine in engines)
    assert seconds <= bound(engines, sum(lengths)) + longest


def test_the_last_rows_wait_for_a_fast_engine_rather_than_start_on_a_slow_one() -> None:
    # Without that the last row on the slow engine would add 10 to 30 percent.
    for speed in (40, 100):
        engines = [Device("fast", 1000, 4, 6), Device("slow", speed, 4, 6)]
        for work in (397, 400, 413):
            _, seconds = run(Dispatcher(engines).generate([row(i, TOKENS) for i in range(work)]))
            assert seconds <= 1.09 * bound(engines, work * TOKENS)
