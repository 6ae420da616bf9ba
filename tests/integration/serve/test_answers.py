"""The API on a live Ray Serve with a tiny model: what clients get is what the engine gives, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from cast_ray.request import SamplingParams
from tests.serving import Server, freed, wait_for

quick = settings(
    max_examples=5,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
PROMPTS = ["t1 t2 t3", "t40", " ".join(f"t{i % 60}" for i in range(90)), "t7 t7 t7 t9"]


def test_output_is_that_of_the_engine_for_the_same_seed(server: Server) -> None:
    client = server.client()
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=11)
        expected = server.engine.generate(PROMPTS, params)
        # One at a time, and all in one request, spread over the replicas.
        together = client.completions.create(
            model="tiny", prompt=PROMPTS, max_tokens=24, temperature=temperature, seed=11
        )
        assert [choice.text for choice in together.choices] == [one.text for one in expected]
        for prompt, one in zip(PROMPTS[:2], expected, strict=False):
            alone = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=24, temperature=temperature, seed=11
            )
            assert alone.choices[0].text == one.text
            assert alone.choices[0].finish_reason == one.finish_reason
            assert alone.usage is not None
            assert alone.usage.prompt_tokens == one.num_input_tokens
            assert alone.usage.completion_tokens == len(one.token_ids)
            assert 0 < alone.usage.speculation["rounds"] <= len(one.token_ids)  # type: ignore[attr-defined]


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    client = server.client()
    whole = client.completions.create(model="tiny", prompt="t1 t2 t3", max_tokens=30, temperature=0.9, seed=5)
    options: Any = {"include_usage": True, "include_trees": True}
    text, rounds, usage = "", 0, None
    trees: list[dict[str, Any]] = []
    with client.completions.create(
        model="tiny", prompt="t1 t2 t3", max_tokens=30, temperature=0.9, seed=5, stream=True, stream_options=options
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                about = getattr(chunk, "round", None) or {}
                rounds = max(rounds, about.get("number", 0))
                trees += about.get("trees", [])
    assert text == whole.choices[0].text
    assert usage == whole.usage
    assert rounds == usage.speculation["rounds"] == len(trees)
    assert sum(len(tree["texts"]) for tree in trees) == usage.speculation["nodes_verified"] > 0
    assert " ".join(word for tree in trees for word in tree["emitted"]) == text.strip()
    for tree in trees:
        # What was accepted is a path from the root, and it was committed.
        assert [tree["parents"][node] for node in tree["accepted"]] == [-1, *tree["accepted"]][: len(tree["accepted"])]
        path = [tree["texts"][node] for node in tree["accepted"]]
        assert tree["emitted"][: len(path)] == path[: len(tree["emitted"])]


def test_the_asynchronous_client_gets_chats_whole_and_streamed(server: Server) -> None:
    messages: Any = [{"role": "system", "content": "t2"}, {"role": "user", "content": [{"type": "text", "text": "t3"}]}]
    expected = server.engine.generate(["t2 t3 t1"], SamplingParams(max_tokens=16, temperature=0.7, seed=2))[0].text

    async def ask() -> tuple[Any, str, str | None]:
        key = server.keys["free"]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            arguments: Any = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0.7, "seed": 2}
            whole = await client.chat.completions.create(**arguments)
            text, reason = "", None
            async for chunk in await client.chat.completions.create(**arguments, stream=True):
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            return whole, text, reason

    whole, text, reason = asyncio.run(ask())
    assert whole.choices[0].message.content == expected == text
    assert whole.choices[0].message.role == "assistant"
    assert whole.object == "chat.completion"
    assert reason == whole.choices[0].finish_reason == "length"


def test_tools_and_template_arguments_reach_the_template(server: Server) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "t3"}], tools=[tool], max_tokens=8, temperature=0
    )
    expected = server.engine.generate(["t3 t9 t1"], SamplingParams(max_tokens=8))[0].text
    assert answer.choices[0].message.content == expected
    with pytest.raises(openai.BadRequestError, match="cannot set chat_template"):
        server.client().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "t3"}],
            extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        )


def test_samples_of_one_prompt_differ_and_are_reproducible(server: Server) -> None:
    arguments: Any = {"model": "tiny", "prompt": "t5", "n": 3, "max_tokens": 16, "temperature": 1.0, "seed": 4}
    first, second = (server.client().completions.create(**arguments) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert first.usage is not None
    assert first.usage.prompt_tokens == 1
    streamed = ["", "", ""]
    for chunk in server.client().completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_log_probabilities_are_the_engines(server: Server) -> None:
    answer = server.client().completions.create(model="tiny", prompt="t1 t2", max_tokens=6, temperature=0, logprobs=2)
    expected = server.engine.generate(["t1 t2"], SamplingParams(max_tokens=6, logprobs=2))[0]
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert expected.logprobs is not None
    assert shown.tokens == [f"t{token}" for token in expected.token_ids]
    assert shown.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    messages: Any = [{"role": "user", "content": "t3"}]
    chat = server.client().chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None
    assert [len(one.top_logprobs) for one in content] == [3] * 6


def test_streamed_log_probabilities_come_with_their_tokens_and_are_those_of_the_whole_answer(server: Server) -> None:
    client = server.client()
    settings: Any = {"model": "tiny", "max_tokens": 20, "temperature": 0.8, "seed": 6, "n": 2}
    rounds: Any = {"include_rounds": True}
    whole = client.completions.create(**settings, prompt="t1 t2", logprobs=2)
    found: list[dict[str, list[Any]]] = [{}, {}]
    for chunk in client.completions.create(
        **settings, prompt="t1 t2", logprobs=2, stream=True, extra_body={"stream_options": rounds}
    ):
        for choice in chunk.choices:
            shown = choice.logprobs.model_dump() if choice.logprobs is not None else {}
            # None is kept back for the end: each chunk has those of its round.
            assert len(shown.get("tokens", [])) == getattr(chunk, "round", {"tokens": 0})["tokens"]
            for name, values in shown.items():
                found[choice.index].setdefault(name, []).extend(values)
    for streamed, choice in zip(found, whole.choices, strict=True):
        assert choice.logprobs is not None
        once = choice.logprobs.model_dump()
        assert (streamed["tokens"], streamed["text_offset"]) == (once["tokens"], once["text_offset"])
        assert streamed["token_logprobs"] == pytest.approx(once["token_logprobs"], abs=1e-4)
        for one, other in zip(streamed["top_logprobs"], once["top_logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-4)

    messages: Any = [{"role": "user", "content": "t3"}]
    asked: Any = {**settings, "messages": messages, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked)
    rows: list[list[Any]] = [[], []]
    chunks = 0
    for part in client.chat.completions.create(**asked, stream=True):
        for one in part.choices:
            if one.logprobs is not None:
                chunks += 1
                rows[one.index] += one.logprobs.content or []
    for streamed_rows, told in zip(rows, answer.choices, strict=True):
        assert told.logprobs is not None
        for row, expected in zip(streamed_rows, told.logprobs.content or [], strict=True):
            assert (row.token, row.bytes) == (expected.token, expected.bytes)
            assert row.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [one.token for one in row.top_logprobs] == [one.token for one in expected.top_logprobs]
    assert chunks > 2


def test_a_choice_is_one_of_its_labels(server: Server) -> None:
    answer = server.client().completions.create(
        model="tiny", prompt="t1 t2", max_tokens=6, temperature=0, extra_body={"guided_choice": ["t4", "t44"]}
    )
    assert answer.choices[0].text in ("t4", "t44")


def test_text_and_tokens_go_both_ways(server: Server) -> None:
    with server.http() as http:
        found = http.post("/tokenize", json={"prompt": "t4 t5", "return_token_strs": True}).json()
        assert found == {"tokens": [4, 5], "count": 2, "token_strs": ["t4", "t5"]}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "t4"}]}).json()
        assert chat["tokens"] == [4, 1]
        assert http.post("/detokenize", json={"tokens": [4, 5]}).json() == {"prompt": "t4 t5"}
        assert http.post("/detokenize", json={"tokens": [4, 99]}).status_code == 400


def test_the_page_is_served_and_asks_nobody_else(server: Server) -> None:
    with server.http(None) as http:
        for path, media in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            answer = http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(media)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "http://" not in answer.text.replace("http://www.w3.org/", "")
            assert "https://" not in answer.text


def test_random_requests_find_no_server_error_and_no_wrong_shape(server: Server) -> None:
    headers = {"authorization": f"Bearer {server.keys['free']}", "x-request-timeout": "5"}
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen = []

    def check(case: schemathesis.Case) -> None:
        answer = case.call(headers=headers)
        seen.append(answer.status_code)
        # A deadline is the one answer of the five hundreds that a client can ask for.
        if answer.status_code != 504:
            case.validate_response(answer, checks=CHECKS)

    found = [operation.ok() for operation in schema.get_all_operations()]
    assert len(found) >= 15
    for operation in found:
        quick(given(case=operation.as_strategy())(check))()
    assert 200 in seen
    wait_for(lambda: freed(server))


def test_folders_of_models_are_not_named(server: Server) -> None:
    with server.http() as http:
        listed = http.get("/v1/models").json()
        assert [one["id"] for one in listed["data"]] == ["tiny"]
        assert http.get("/v1/models/tiny").json()["object"] == "model"
        assert http.get(f"/v1/models/{Path('/etc/passwd')}").status_code == 404
