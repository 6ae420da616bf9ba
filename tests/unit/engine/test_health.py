"""A drafter that brings nothing is told from one that does, said once, left out, and tried again now and then."""

from __future__ import annotations

import logging

import pytest
from numpy.random import default_rng

from cast_ray.engine.health import FIRST_REST, DrafterHealth


def run(health: DrafterHealth, rounds: int, accepted: float, expected: float, batch: int = 1, seed: int = 0) -> int:
    """Rounds with Poisson acceptance of a mean a request; how many of them drafted."""
    chance, drafted = default_rng(seed), 0
    for _ in range(rounds):
        if health.may_draft():
            drafted += 1
            health.observe(batch, float(chance.poisson(accepted, batch).sum()), expected * batch)
    return drafted


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [(0.0, 0.4), (0.0, 0.01), (0.0, 3.0), (0.02, 1.5)],
    ids=["shuffled weights", "flat scores", "over-confident", "chance"],
)
def test_a_drafter_at_chance_is_left_out_within_a_hundred_rounds(
    accepted: float, expected: float, caplog: pytest.LogCaptureFixture
) -> None:
    health = DrafterHealth("mine")
    assert run(health, 400, accepted, expected) <= 100
    assert health.verdict == "rejected"
    assert len(caplog.records) == 1
    for cause in ("'mine'", "quantisation", "chat template", "mask_token_id", "target_layer_ids", "check-drafter"):
        assert cause in caplog.text


def test_a_sound_drafter_is_never_left_out(caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(20):
        health = DrafterHealth("mine")
        assert run(health, 500, accepted=0.6, expected=0.9, seed=seed) == 500
        assert health.verdict == "healthy"
    assert caplog.text == ""


def against_record(accepted: float, rounds: int, seed: int = 0, promised: float = 1.7) -> DrafterHealth:
    """Rounds of which the record lets expect a token; what was promised is more."""
    health, chance = DrafterHealth("mine"), default_rng(seed)
    for _ in range(rounds):
        got = float(chance.poisson(accepted))
        health.observe(1, got, promised, recorded=1.0, variance=1.4, counted=got)
    return health


def test_a_drafter_that_falls_behind_its_record_is_said_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    health = against_record(0.2, 400, promised=0.2)
    assert health.verdict == "behind"
    assert health.may_draft()
    assert health.report()["share_of_record"] == pytest.approx(0.2, abs=0.15)
    assert health.report()["likely_causes"]
    assert "of the tokens that its record lets expect" in caplog.text
    assert "positions of its context" in caplog.text


def test_a_drafter_that_keeps_most_of_its_record_is_never_behind_by_chance(caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(40):
        assert against_record(0.9, 960, seed).verdict == "healthy"
    assert caplog.text == ""


def test_an_over_confident_drafter_is_no_longer_doubted_where_its_record_knows_of_it() -> None:
    assert against_record(0.6, 96, promised=2.0).verdict == "healthy"
    without = DrafterHealth("mine")
    run(without, 96, accepted=0.6, expected=2.0)
    assert without.verdict == "doubtful"


def test_half_kept_promises_are_said_and_the_policy_decides(caplog: pytest.LogCaptureFixture) -> None:
    health = DrafterHealth("mine")
    assert run(health, 300, accepted=0.8, expected=3.0) == 300
    assert health.verdict == "doubtful"
    assert "helps less than it should" in caplog.text
    assert health.report()["likely_causes"]


def test_one_large_batch_is_no_verdict() -> None:
    health = DrafterHealth("mine")
    run(health, 7, accepted=0.0, expected=1.0, batch=64)
    assert health.verdict == "unknown"
    run(health, 1, accepted=0.0, expected=1.0, batch=64)
    assert health.verdict == "rejected"


def test_rounds_without_candidates_count_for_nothing() -> None:
    health = DrafterHealth("mine")
    for _ in range(500):
        health.observe(0, 0.0, 0.0)
    assert health.verdict == "unknown"


def test_it_is_tried_again_ever_more_rarely_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    health = DrafterHealth("mine")
    drafted = run(health, 10_000, accepted=0.0, expected=1.0)
    # Five tries in ten thousand rounds: after 500, 1000, 2000 and 4000 rounds of rest.
    assert drafted == 5 * 96
    assert len(caplog.records) == 1
    with caplog.at_level(logging.INFO):
        run(health, 10_000, accepted=1.0, expected=1.2)
    assert health.verdict == "healthy"
    assert health.report()["drafting"]
    assert "back at work" in caplog.text
    assert run(health, FIRST_REST, accepted=1.0, expected=1.2) == FIRST_REST
