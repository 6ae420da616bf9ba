"""The job's summary names who proposed what was accepted, where that was not a drafter alone."""

from cast_ray.stats.report import source_words


def test_accepted_candidates_are_added_up_over_the_engines_by_source() -> None:
    actors = [
        {"accepted_by_source": {"drafter": 5, "prompt": 2, "output": 0, "rows": 7, "grammar": 0}},
        {"accepted_by_source": {"drafter": 1, "prompt": 1, "output": 0, "rows": 0, "grammar": 0}},
        {"name": "one that never came up"},
    ]
    assert source_words(actors) == "6 drafter, 3 prompt, 7 rows"


def test_a_drafter_alone_is_not_worth_a_line() -> None:
    assert source_words([{"accepted_by_source": {"drafter": 5, "prompt": 0}}, {}]) is None
