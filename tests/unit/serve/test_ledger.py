"""Requests go where they are predicted to finish first; replicas are counted by what they have to do."""

from __future__ import annotations

import pytest

from cast_ray.request import SamplingParams
from cast_ray.serve import pace as pace_module
from cast_ray.serve.ledger import REMEMBERED, STALE_S, Cost, Ledger, rank
from cast_ray.serve.pace import Pace
from cast_ray.serve.scaling import ByOutstandingTokens
from cast_ray.serve.wire import PREFIX_BLOCK, Ask


def ask(prompt: object, max_tokens: int = 50) -> Ask:
    return Ask("r", prompt, SamplingParams(max_tokens=max_tokens))  # type: ignore[arg-type]


def test_a_fast_replica_takes_more() -> None:
    assert rank([10, 10], [0, 0], [10.0, 40.0]) == [1, 0]
    assert rank([10, 10], [0, 30], [10.0, 40.0]) == [0, 1]  # a tie goes to the first
    assert rank([10, 10], [0, 31], [10.0, 40.0]) == [0, 1]
    assert rank([10, 10], [5, 0], [None, None]) == [1, 0]
    # Not measured yet: as fast as the others.
    assert rank([10, 10], [5, 0], [20.0, None]) == [1, 0]


def test_a_known_beginning_draws_as_far_as_it_pays() -> None:
    long = ask("x" * 40 * PREFIX_BLOCK)
    ledger = Ledger()
    ledger.remember(long.prefix_hashes())
    there = Cost.of(long, None).at(ledger.known(long.prefix_hashes()))
    elsewhere = Cost.of(long, None).at(0)
    assert there < elsewhere
    assert rank([elsewhere, there], [0, elsewhere - there - 1], [10.0, 10.0]) == [1, 0]
    assert rank([elsewhere, there], [0, elsewhere - there + 1], [10.0, 10.0]) == [0, 1]


def test_beginnings_are_known_by_whole_blocks_of_what_is_equal() -> None:
    first, second = "a" * PREFIX_BLOCK, "b" * PREFIX_BLOCK
    ledger = Ledger()
    ledger.remember(ask(first + second + "x").prefix_hashes())
    assert ledger.known(ask(first + second + "y").prefix_hashes()) == 2
    assert ledger.known(ask(first + first).prefix_hashes()) == 1
    assert ledger.known(ask(second + first).prefix_hashes()) == 0
    chat = [{"role": "system", "content": first}, {"role": "user", "content": "x"}]
    ledger.remember(ask(chat).prefix_hashes())
    assert ledger.known(ask([chat[0], {"role": "user", "content": "y"}]).prefix_hashes()) == 1
    assert ask([1, 2, 3]).prefix_hashes() == []


def test_what_a_router_remembers_is_bounded() -> None:
    ledger = Ledger()
    ledger.remember(list(range(REMEMBERED + 10)))
    assert len(ledger.prefixes) == REMEMBERED
    assert ledger.known([0]) == 0


def test_what_others_sent_is_what_was_not_sent_here() -> None:
    ledger = Ledger()
    ledger.send("a", 30)
    ledger.send("a", 30)
    ledger.update({"report": 1, "outstanding_tokens": 100}, now=0)
    assert ledger.others == 40
    ledger.complete("a")
    assert ledger.sent == 30
    ledger.update({"report": 1, "outstanding_tokens": 100}, now=1)
    assert ledger.others == 40
    ledger.complete("a")
    ledger.complete("a")
    assert ledger.sent == 0
    assert ledger.mine == {}
    ledger.update({"report": 1, "outstanding_tokens": 100}, now=STALE_S + 1)
    assert ledger.others == 0


def test_expected_tokens_are_the_usual_ones_but_no_more_than_asked_for() -> None:
    assert Cost.of(ask("", 500), 80.0).output == 80
    assert Cost.of(ask("", 20), 80.0).output == 20


def test_replicas_follow_the_tokens_outstanding() -> None:
    policy = ByOutstandingTokens(target_tokens=100)
    assert policy.wanted(0, 1) == 1
    assert policy.wanted(101, 1) == 2
    assert policy.wanted(950, 2) == 10
    # Down one at a time, and only with room to spare.
    assert policy.wanted(0, 4) == 3
    assert policy.wanted(290, 4) == 4
    assert policy.wanted(190, 2) == 2


def test_the_pace_is_that_of_late_requests_and_is_forgotten() -> None:
    pace = Pace()
    assert pace.tokens_per_s(0) is None
    pace.observe(1, 5.0)
    assert pace.tokens_per_s(pace.at) is None
    pace.observe(11, 1.0)
    assert pace.tokens_per_s(pace.at) == 10
    for _ in range(100):
        pace.observe(101, 1.0)
    assert pace.tokens_per_s(pace.at) == pytest.approx(100, rel=0.01)
    assert pace.tokens_per_s(pace.at + pace_module.STALE_S + 1) is None
