"""Bodies mean what OpenAI says they mean, and what is wrong is refused by name, without the client's text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cast_ray.config import ServeLimits
from cast_ray.request import SamplingParams
from cast_ray.serve.protocol import ChatRequest, CompletionRequest, params_of, refusal_of
from cast_ray.serve.refusal import Refusal, clean_message, from_failure
from cast_ray.serve.wire import Failure

LIMITS = ServeLimits(n=4, prompts=2, schema_depth=7)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"model": "m", "prompt": "hello", **fields}))


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hello"}]
    return ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": messages, **fields}))


def refused(kind: Any, body: str) -> Refusal:
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(body)
    return refusal_of(found.value)


def test_defaults_are_those_of_openai() -> None:
    assert params_of(completion(), LIMITS) == SamplingParams(max_tokens=16, temperature=1.0)
    assert params_of(chat(), LIMITS) == SamplingParams(max_tokens=LIMITS.default_max_tokens, temperature=1.0)


def test_fields_reach_the_engine() -> None:
    params = params_of(
        completion(
            max_tokens=5, temperature=0.5, top_p=0.9, seed=-1, stop="x", logit_bias={"3": -100}, logprobs=2,
            presence_penalty=1, frequency_penalty=-1, top_k=7, min_p=0.1, repetition_penalty=1.1, ignore_eos=True,
        ),
        LIMITS,
    )  # fmt: skip
    expected = SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, seed=2**63 - 1, stop=("x",), logit_bias={3: -100}, logprobs=2,
        presence_penalty=1, frequency_penalty=-1, top_k=7, min_p=0.1, repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip
    assert params == expected


def test_forms_of_the_output_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(params_of(chat(response_format=wanted), LIMITS).json_schema or "") == schema
    assert params_of(chat(response_format={"type": "json_object"}), LIMITS).json_object
    assert params_of(completion(guided_regex="a+"), LIMITS).regex == "a+"
    assert params_of(completion(structured_outputs={"choice": ["a", "b"]}), LIMITS).choice == ("a", "b")


def test_a_chat_asks_for_log_probabilities_in_two_fields() -> None:
    assert params_of(chat(logprobs=True, top_logprobs=3), LIMITS).logprobs == 3
    assert params_of(chat(logprobs=True), LIMITS).logprobs == 0
    assert params_of(chat(logprobs=False), LIMITS).logprobs is None
    with pytest.raises(Refusal, match="top_logprobs needs logprobs"):
        params_of(chat(top_logprobs=3), LIMITS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"prompt": ["a", "b", "c"]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_json": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}}}, "guided_json"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_what_is_not_to_be_had_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as found:
        params_of(completion(**fields), LIMITS)
    assert found.value.status == 400
    assert found.value.param == param


def test_wrong_bodies_are_refused_in_openais_words() -> None:
    unknown = refused(CompletionRequest, '{"model": "m", "prompt": "x", "zork": 1}')
    assert (unknown.message, unknown.code, unknown.param) == (
        "Unknown parameter: 'zork'.",
        "unknown_parameter",
        "zork",
    )
    missing = refused(CompletionRequest, '{"model": "m"}')
    assert (missing.code, missing.param) == ("missing_required_parameter", "prompt")
    wrong = refused(CompletionRequest, '{"model": "m", "prompt": "x", "temperature": "hot"}')
    assert (wrong.code, wrong.param) == ("invalid_value", "temperature")
    assert "hot" in wrong.message
    for body in ("", "[1]", '{"model": "m', '{"model": "\\ud800"}', '{"temperature": NaN}', "{" * 5000):
        assert refused(CompletionRequest, body).status == 400


def test_the_clients_text_is_not_repeated() -> None:
    assert "SECRET" not in refused(CompletionRequest, '{"model": "m", "prompt": {"SECRET": 1}}').message
    assert "SECRET" not in refused(ChatRequest, '{"model": "m", "messages": ["SECRET"]}').message
    for message in (
        "prompt='SECRET: and more': has no tokens. Give at least one",
        "messages=[{'role': 'SECRET', 'content': 'a: b'}]: must have a role. Write one",
        "messages[3]={'role': 'SECRET...: must have a role. Write one",
        'prompt="it\'s: SECRET": has no tokens. Give at least one',
    ):
        cleaned = clean_message(message, {})
        assert "SECRET" not in cleaned
        assert cleaned.endswith(message.rsplit(": ", 1)[1])
    assert clean_message("temperature=9: must be less. Try 1", {}) == "temperature=9: must be less. Try 1"
    assert clean_message("target '/home/x/m' has none", {"/home/x/m": "m"}) == "target 'm' has none"


def test_failures_have_the_status_that_clients_act_on() -> None:
    kinds = {"QueueFullError": 429, "RequestError": 400, "EngineError": 503, "KeyError": 500}
    for kind, status in kinds.items():
        refusal = from_failure(Failure(kind, "max_tokens=9: is too many. Lower it"), {}, 7)
        assert refusal.status == status
        assert set(refusal.body()["error"]) == {"message", "type", "param", "code"}
    full = from_failure(Failure("QueueFullError", ""), {}, 7)
    assert full.all_headers() == {"Retry-After": "7"}
    long = Failure("RequestError", "prompt: 600 tokens leave no room for an answer in a context of 480. Shorten it")
    assert from_failure(long, {}, 1).code == "context_length_exceeded"


def test_messages_are_flattened_to_text_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).chat()[0]["content"] == "ab"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert chat(messages=[call]).chat()[0]["content"] == ""
    for message in ({"role": "user", "content": [{"type": "image_url"}]}, {"content": "x"}, {"role": "user"}):
        with pytest.raises(Refusal):
            chat(messages=[message]).chat()


def test_tools_are_offered_unless_the_client_says_no() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools).offered_tools == tools
    assert chat(tools=tools, tool_choice="none").offered_tools is None
    for bad in ({"tools": [{"type": "function"}]}, {"tools": tools, "tool_choice": "required"}):
        with pytest.raises(Refusal):
            params_of(chat(**bad), LIMITS)
