"""Every field of SamplingParams is held to its meaning, and a wrong value is named with its field."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cast_ray.errors import RequestError
from cast_ray.request import (
    LONGEST_BAD_WORD,
    LONGEST_CHOICE,
    LONGEST_REGEX,
    LONGEST_SCHEMA,
    LONGEST_STOP,
    MOST_BAD_WORDS,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_LOGPROBS,
    MOST_SAMPLES,
    MOST_STOP_TOKENS,
    MOST_STOPS,
    SEED_LIMIT,
    SamplingParams,
    derive_seed,
)

NAN, INF = math.nan, math.inf
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, NAN, "9", True, None],
    "temperature": [-0.1, NAN, INF, 1e-5, "hot", None, True],
    "seed": [-1, SEED_LIMIT, 1.0, "a", True],
    "stop_token_ids": [[-1], [1.0], [True], "12", {1: 2}, 5, [0] * (MOST_STOP_TOKENS + 1)],
    "ignore_eos": [1, "true", None],
    "top_p": [0, -0.5, 1.1, NAN, "1", True],
    "top_k": [-2, 1.5, NAN, True],
    "min_p": [-0.1, 1.1, NAN, True],
    "repetition_penalty": [0, -1, 101, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [{-1: 1}, {"x": 1}, {1: NAN}, {1: 101}, {1: "2"}, {True: 1}, [1], dict.fromkeys(range(4097), 1.0)],
    "bad_words": [[""], "word", [5], ["x" * (LONGEST_BAD_WORD + 1)], ["x"] * (MOST_BAD_WORDS + 1)],
    "allowed_token_ids": [[], [-1], "5", [0.5]],
    "stop": [[""], "", [5], {"a": 1}, ["x" * (LONGEST_STOP + 1)], ["x"] * (MOST_STOPS + 1)],
    "include_stop_str_in_output": [1, "no"],
    "min_tokens": [-1, 0.5, True],
    "n": [0, -1, 1.5, MOST_SAMPLES + 1, True],
    "logprobs": [-1, MOST_LOGPROBS + 1, 1.5],
    "prompt_logprobs": [-1, MOST_LOGPROBS + 1, True],
    "echo": [1],
    "skip_special_tokens": ["yes"],
    "spaces_between_special_tokens": [0],
    "choice": [["a", "a"], "yes", [""], [1], ["x" * (LONGEST_CHOICE + 1)], [str(i) for i in range(MOST_CHOICES + 1)]],
    "choice_probabilities": [1, True],  # without a choice
    "regex": ["", 5, "x" * (LONGEST_REGEX + 1)],
    "json_schema": ["{", "[]", "5", [1], {"a": NAN}, {"a": {1, 2}}, {"title": "x" * LONGEST_SCHEMA}],
    "json_object": [1, "true"],
}
RIGHT: dict[str, list[Any]] = {
    "max_tokens": [1, 10**6],
    "temperature": [0, 0.0, 1e-4, 2, 100.0],
    "seed": [0, SEED_LIMIT - 1],
    "stop_token_ids": [[], [0, 7], (3,), {4}],
    "top_p": [1, 0.001],
    "top_k": [-1, 0, 1, 10**9],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2.0],
    "logit_bias": [{}, {"5": -100}, {7: 100}, dict.fromkeys(range(MOST_BIASES), 1.0)],
    "bad_words": [["a", " b"]],
    "allowed_token_ids": [None, [3]],
    "stop": ["a", ["a", "b"], ()],
    "n": [1],
    "logprobs": [None, 0, MOST_LOGPROBS],
    "prompt_logprobs": [0],
    "choice": [["a", "b"]],
    "regex": ["a+"],
    "json_schema": [{"type": "object"}, "true", '{"type": "string"}'],
}


def test_the_cases_name_every_field() -> None:
    assert set(WRONG) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=str
)
def test_a_wrong_value_is_named_with_its_field_and_a_remedy(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name}(\[.*\])?=.*: .*\. .+", check=lambda e: len(str(e)) < 600):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values], ids=str
)
def test_what_lies_on_the_border_is_taken(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert SamplingParams.from_dict({name: value}) == params


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"choice": ["a"], "regex": "a"}, "regex"),
        ({"regex": "a", "json_object": True}, "json_object"),
        ({"json_schema": "{}", "choice": ["a"]}, "json_schema"),
        ({"choice": ["a"], "min_tokens": 1}, "min_tokens"),
        ({"regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"json_object": True, "bad_words": ["x"]}, "bad_words"),
        ({"choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"choice_probabilities": True}, "choice_probabilities"),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}="):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        ({"guided_choice": ["a"]}, {"choice": ("a",)}),
        ({"guided_json": {"type": "null"}}, {"json_schema": '{"type": "null"}'}),
        ({"structured_outputs": {"regex": "x", "json": None}}, {"regex": "x"}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, {"json_schema": "{}"}),
        ({"temperature": None, "stop": None}, {}),
        ({"stop": "x"}, {"stop": ("x",)}),
    ],
    ids=str,
)
def test_the_spellings_of_openai_and_vllm_are_known(said: dict[str, Any], meant: dict[str, Any]) -> None:
    before = copy.deepcopy(said)
    assert SamplingParams.from_dict(said) == SamplingParams(**meant)
    assert said == before, "the caller's mapping is the caller's"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"choice": ["a"], "guided_choice": ["b"]}, "choice"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": ["a"]}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "x"}}, "guided_grammar"),
    ],
    ids=str,
)
def test_what_is_unknown_or_said_twice_is_refused(said: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}="):
        SamplingParams.from_dict(said)


def test_parameters_are_values() -> None:
    first = SamplingParams(logit_bias={"1": 2.0, "3": 4}, stop=["a"], seed=1, temperature=0.5)
    same = SamplingParams(logit_bias={3: 4.0, 1: 2}, stop=("a",), seed=1, temperature=0.5)
    assert first == same
    assert hash(first) == hash(same)
    assert len({first, same, replace(first, seed=2)}) == 2
    assert pickle.loads(pickle.dumps(first)) == first


@given(st.lists(st.one_of(st.integers(0, 2**70), st.text(max_size=5)), min_size=2, max_size=4))
def test_a_derived_seed_depends_on_every_part_and_its_kind(parts: list[int | str]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < SEED_LIMIT
    assert seed == derive_seed(*parts)
    assert seed != derive_seed(*parts[:-1])
    first = parts[0]
    assert seed != derive_seed(str(first) if isinstance(first, int) else f"{first}x", *parts[1:])
