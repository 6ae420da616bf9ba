"""The course of a job: rates and means of spans, deaths bridged, and few samples however long it runs."""

from __future__ import annotations

from typing import Any

import pytest

from cast_ray.stats.timeline import Timeline, grown


def look(**rounds: int | None) -> dict[str, Any]:
    """Statistics of engines that commit 2 tokens and verify 5 candidates a round."""
    return {
        name: {
            "engine": {"rounds": count, "mean_round_length": 2.0, "nodes_verified": 5 * count}
            if count is not None
            else None
        }
        for name, count in rounds.items()
    }


def test_rates_and_means_are_those_of_each_span() -> None:
    timeline = Timeline()
    for seconds, rounds in ((0.0, 0), (2.0, 10), (4.0, 40), (6.0, 40)):
        timeline.add(seconds, rounds, look(a=rounds))
    told = timeline.to_dict()
    assert told["seconds"] == [2.0, 4.0, 6.0]
    assert told["tokens_per_s"] == [10.0, 30.0, 0.0]
    assert told["round_length"] == [2.0, 2.0, None]
    assert told["width"] == {"a": [5.0, 5.0, None]}


def test_an_engine_that_starts_again_does_not_take_back_what_it_did() -> None:
    timeline = Timeline()
    for seconds, rounds in enumerate((0, 50, None, 10, 30)):
        timeline.add(float(seconds), 0, look(a=rounds, b=100))
    assert timeline.newest is not None
    assert timeline.newest.actors["a"]["rounds"] == 80
    assert all(rate >= 0 for rate in timeline.to_dict()["tokens_per_s"])


def test_a_long_job_keeps_few_samples_and_its_ends() -> None:
    timeline = Timeline()
    for seconds in range(20_000):
        timeline.add(float(seconds), seconds, look(a=seconds))
    told = timeline.to_dict()
    assert len(timeline.samples) <= 480
    assert told["seconds"][-1] == 19_999
    assert told["tokens_per_s"] == pytest.approx([2.0] * len(told["seconds"]))


def test_the_last_moments_begin_at_a_sample_old_enough() -> None:
    timeline = Timeline()
    assert timeline.since(3.0) is None
    for seconds in range(11):
        timeline.add(float(seconds), seconds, look(a=seconds))
    span = timeline.since(3.0)
    assert span is not None
    assert (span[0].seconds, span[1].seconds) == (7.0, 10.0)
    assert grown(*span, None, "rounds") == 3
