"""Where an output ends inside what a round commits, and what is appended without asking the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cast_ray.engine.ending import take
from cast_ray.engine.sequence import Ending, Sequence
from cast_ray.request import SamplingParams
from cast_ray.sampling.choice import LabelGrammar, LabelTree
from cast_ray.sampling.emitting import Emitting

END = 9
LABELS = LabelTree({"a": [1, 2, 3], "b": [1, 4], "c": [5], "d": [5, 6]}, [END])


def request(stop: frozenset[int] = frozenset({END}), **params: Any) -> Sequence:
    said = SamplingParams(**{"max_tokens": 8, **params})
    grammar = LabelGrammar(LABELS) if said.choice else None
    emitting = Emitting(said, 2, sorted(stop), (), grammar)
    return Sequence("r", [7, 8], 2, said, 0, stop, 2 + said.max_tokens, emitting=emitting)


@pytest.mark.parametrize(
    ("tokens", "kept", "ending"),
    [
        ([1, 2], [1, 2], None),
        ([1, END, 3], [1, END], Ending("stop", hides_last=True)),
        ([1] * 12, [1] * 8, Ending("length")),
        ([1] * 7 + [END, 4], [1] * 7 + [END], Ending("stop", hides_last=True)),
    ],
)
def test_what_comes_first_ends_it(tokens: list[int], kept: list[int], ending: Ending | None) -> None:
    sequence = request()
    assert take(sequence, tokens) == kept
    assert sequence.tokens == [7, 8, *kept]
    assert sequence.ending == ending


CHOICE = ("a", "b", "c", "d")


def test_a_label_is_completed_once_no_other_is_left() -> None:
    sequence = request(choice=CHOICE)
    assert take(sequence, [1]) == [1]
    assert sequence.ending is None
    assert take(sequence, [2]) == [2, 3]
    assert sequence.ending == Ending("stop")


@pytest.mark.parametrize(
    ("params", "stop", "kept", "ending"),
    [
        # The target is asked for the log probabilities of every token.
        ({"logprobs": 0}, frozenset({END}), [1, 2], None),
        ({"max_tokens": 3}, frozenset({END}), [1, 2, 3], Ending("stop")),
        ({"max_tokens": 2}, frozenset({END}), [1, 2], Ending("length")),
        ({"stop_token_ids": (3,)}, frozenset({END, 3}), [1, 2, 3], Ending("stop", 3, hides_last=True)),
    ],
    ids=str,
)
def test_completing_a_label_keeps_to_what_else_was_asked(
    params: dict[str, Any], stop: frozenset[int], kept: list[int], ending: Ending | None
) -> None:
    sequence = request(stop, choice=CHOICE, **params)
    assert take(sequence, [1, 2]) == kept
    assert sequence.ending == ending


def test_a_label_that_begins_another_is_not_completed() -> None:
    sequence = request(choice=CHOICE)
    assert take(sequence, [5]) == [5]
    assert sequence.ending is None
    assert take(sequence, [END]) == [END]
    assert sequence.ending == Ending("stop", hides_last=True)


def test_counts_follow_the_tokens_that_are_kept() -> None:
    sequence = request(presence_penalty=1.0)
    assert sequence.emitting is not None
    rules = sequence.emitting.rules(sequence.tokens, 12, torch.device("cpu"))
    assert rules is not None
    assert rules.counts is not None
    take(sequence, [1, 1, END, 4])
    assert rules.counts.output.nonzero()[:, 0].tolist() == [1, END]
    assert rules.counts.output[1] == 2
