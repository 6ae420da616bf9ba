"""The API on a live Ray Serve with a tiny model: what clients get, what they are refused, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams
from cast_ray.serve.backend import ABOUT_FRESH_S
from tests.serving import PATIENCE_S, Server, running_server, wait_for

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
LONG = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"body_bytes": 65536, "n": 4, "storage_bytes": 20_000}
    with running_server(tmp_path_factory.mktemp("serve"), max_ongoing=32, max_queued=4, limits=limits) as found:
        yield found


def freed(server: Server) -> bool:
    """Nothing aboard any replica, and every page free again."""
    time.sleep(ABOUT_FRESH_S)  # or what is told may be from before
    found = server.replicas()
    return bool(found) and all(
        not one["aboard"]
        and not one["engine"]["running"]
        and not one["engine"]["waiting"]
        and one["engine"]["kv_pages_free"] == one["engine"]["kv_pages"]
        for one in found
    )


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


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("unknown field", {"zork": 1}, 400, "unknown_parameter"),
    ("wrong type", {"max_tokens": "ten"}, 400, "invalid_value"),
    ("out of range", {"temperature": 3}, 400, "invalid_value"),
    ("too small to divide by", {"temperature": 1e-9}, 400, "invalid_value"),
    ("other model", {"model": "gpt-4"}, 404, "model_not_found"),
    ("too many samples", {"n": 5}, 400, None),
    ("empty prompt", {"prompt": ""}, 400, None),
    ("ids out of range", {"prompt": [5, 64]}, 400, None),
    ("too long", {"prompt": "t1 " * 600}, 400, "context_length_exceeded"),
    ("suffix", {"suffix": "x"}, 400, "unsupported_parameter"),
    ("options without a stream", {"stream_options": {"include_usage": True}}, 400, None),
    ("contradiction", {"guided_regex": "a", "guided_choice": ["b"]}, 400, "invalid_value"),
]


@pytest.mark.parametrize(("changes", "status", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_as_openai_does(
    server: Server, changes: dict[str, Any], status: int, code: str | None, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": "t1", "max_tokens": 4, **changes}
    if stream and "stream_options" not in changes:
        body["stream"] = True
    with server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert "/" not in error["message"].replace("and/or", "")


def test_prompts_and_paths_are_not_told_back(server: Server) -> None:
    secret = "t63-SECRET"
    with server.http() as http:
        answers = [
            http.post("/v1/completions", json={"model": "tiny", "prompt": {secret: 1}}),
            http.post(
                "/v1/completions", content=f'{{"prompt": "{secret}', headers={"content-type": "application/json"}
            ),
            http.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": secret, "content": 3}]}),
            http.post("/tokenize", json={"messages": [{"role": "user", "content": None, "x": secret}]}),
        ]
        for answer in answers:
            assert answer.status_code == 400
            assert secret not in answer.text
            assert "Traceback" not in answer.text
        for path in ("/v1/completions", "/tokenize"):
            assert http.post(path, json={"model": "tiny", "prompt": secret} if "v1" in path else {"prompt": secret})
    found = [path for path in server.logs.rglob("*") if path.is_file()]
    assert any("serve" in path.parts for path in found)
    assert not [path for path in found if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/..%2f..%2fkeys.yaml",
        "/v1/files/file-../content",
        "/%2e%2e/keys.yaml",
        "/page.js/../../keys.yaml",
        "/v1/files/file-%00/content",
        "/v1/batches/%ff%fe",
    ],
)
def test_path_tricks_find_nothing(server: Server, path: str) -> None:
    with server.http() as http:
        answer = http.get(path)
    assert answer.status_code == 404
    assert "sha256" not in answer.text


JUNK = {
    "no number": b"Content-Length: ten\r\n",
    "negative": b"Content-Length: -5\r\n",
    "two lengths": b"Content-Length: 3\r\nContent-Length: 30\r\n",
    "length and chunks": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
    "no header": b"\x00\xff\r\n",
    "very long": b"X-Long: " + b"x" * 200_000 + b"\r\n",
    "key of bytes": b"Content-Length: 2\r\nAuthorization: Bearer \xff\xfe\r\n",
    "request id of bytes": b"Content-Length: 2\r\nX-Request-Id: \xff\xfe\r\n",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_header_junk_is_refused_and_harms_nobody(server: Server, junk: bytes) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    received = b""
    with socket.create_connection((host, int(port)), PATIENCE_S) as line, contextlib.suppress(ConnectionError):
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        line.sendall(b"Content-Type: application/json\r\n" + junk + b"\r\n{}")
        line.shutdown(socket.SHUT_WR)
        while part := line.recv(65536):
            received += part
    # Whatever is not HTTP is refused by Serve's proxy, by an answer or by hanging up; such an id fails in it.
    in_proxy = received.startswith(b"HTTP/1.1 500") and received.endswith(b"\r\n\r\nInternal Server Error")
    assert not received or received.startswith(b"HTTP/1.1 4") or (b"X-Request-Id" in junk and in_proxy), received[:200]
    assert b"Traceback" not in received
    with server.http() as http:
        assert http.get("/v1/models").status_code == 200


def test_bodies_that_are_too_large_or_of_another_type_are_refused(server: Server) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": "t1 " * 40_000}).status_code == 413
        chunks = (b" " * 8192 for _ in range(20))
        chunked = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
        assert chunked.status_code == 413
        form = http.post("/v1/completions", data={"model": "tiny"})
        assert form.status_code == 415
        assert http.put("/v1/completions").status_code == 405
        deep = '{"model":"tiny","prompt":"t1","guided_json":' + '{"a":' * 150 + "1" + "}" * 151
        answer = http.post("/v1/completions", content=deep, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "nested" in answer.json()["error"]["message"]


def test_keys_are_needed_and_their_limits_hold(server: Server) -> None:
    for key in (None, "sk-wrong", "é" * 600):
        with server.http(None) as http:
            headers = {"authorization": f"Bearer {key}".encode()} if key else {}
            for path in ("/v1/models", "/v1/files", "/status"):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
    with server.http(None) as http:
        assert http.get("/health").json() == {"status": "ok"}
    slow = server.client("slow")
    for _ in range(2):
        slow.completions.create(model="tiny", prompt="t1", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        slow.completions.create(model="tiny", prompt="t1", max_tokens=1, stream=True)
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert refused.value.response.headers.get("x-request-id")
    single = server.client("single")
    with single.completions.create(model="tiny", prompt="t1", stream=True, **LONG) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            single.completions.create(model="tiny", prompt="t1", max_tokens=1)
    wait_for(lambda: freed(server))
    assert single.completions.create(model="tiny", prompt="t1", max_tokens=1).choices


def aborted(server: Server) -> int:
    return sum(one["engine"]["finish_reasons"].get("abort", 0) for one in server.replicas())


def test_a_client_that_goes_away_frees_its_place(server: Server) -> None:
    client = server.client()
    wait_for(lambda: len(server.replicas()) == 2)
    before = aborted(server)
    for endpoint in ("completions", "chat"):
        if endpoint == "chat":
            messages: Any = [{"role": "user", "content": "t3"}]
            stream: Any = client.chat.completions.create(model="tiny", messages=messages, stream=True, **LONG)
        else:
            stream = client.completions.create(model="tiny", prompt="t1 t2", stream=True, **LONG)
        next(iter(stream))
        stream.close()
    # One that waits for the whole of a long answer.
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).completions.create(
            model="tiny", prompt="t1", n=4, **{**LONG, "temperature": 1}
        )
    # On a busy machine an answer may be ready before its client is seen to be gone, but not every one.
    wait_for(lambda: aborted(server) > before)
    wait_for(lambda: freed(server))


def test_a_deadline_ends_a_request(server: Server) -> None:
    body = {"model": "tiny", "prompt": "t1", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.05"})
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        bad = http.post("/v1/completions", json=body, headers={"x-request-timeout": "soon"})
        assert bad.status_code == 400
    wait_for(lambda: freed(server))


def test_more_than_the_queues_take_is_refused_before_the_first_byte(server: Server) -> None:
    def ask(number: int) -> tuple[int, str | None, str]:
        body = {"model": "tiny", "prompt": f"t{number % 60}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with server.http() as http:
            answer = http.post("/v1/completions", json={**body, "stream": number % 2 == 0})
        return answer.status_code, answer.headers.get("retry-after"), answer.text

    with ThreadPoolExecutor(60) as pool:
        found = list(pool.map(ask, range(60)))
    assert {status for status, _, _ in found} == {200, 429}
    for number, (status, retry_after, text) in enumerate(found):
        if status == 429:
            assert int(retry_after or 0) >= 1
            assert json.loads(text)["error"]["type"] == "rate_limit_error"
        elif number % 2 == 0:
            assert text.rstrip().endswith("data: [DONE]")
    wait_for(lambda: freed(server))


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


def test_a_batch_file_is_answered_on_the_same_replicas(server: Server) -> None:
    client = server.client()
    lines = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": f"t{number} t3", "max_tokens": 6, "temperature": 0},
        }
        for number in range(12)
    ]
    lines[5]["body"] = {"model": "tiny", "prompt": "t1", "temperature": 9}
    content = "\n".join(map(json.dumps, lines)).encode()
    sent = client.files.create(file=("../../rows.jsonl", content), purpose="batch")
    assert sent.filename == "rows.jsonl"
    batch = client.batches.create(
        input_file_id=sent.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "test"}
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (11, 1)
    assert done.output_file_id is not None
    rows = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    good = [number for number in range(12) if number != 5]
    expected = server.engine.generate([f"t{number} t3" for number in good], SamplingParams(max_tokens=6))
    assert texts == {f"row-{number}": one.text for number, one in zip(good, expected, strict=True)}
    assert done.error_file_id is not None
    failed = json.loads(client.files.content(done.error_file_id).text)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("row-5", 400)
    # Nobody else sees them.
    with pytest.raises(openai.NotFoundError):
        server.client("single").files.content(done.output_file_id)
    assert [one.id for one in client.batches.list()] == [batch.id]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    # Two such files are more than one key may keep; nothing is left of the one that is refused.
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("more.jsonl", b" " * 19_000), purpose="batch")
    assert refused.value.code == "storage_limit_exceeded"
    assert "Delete some" in refused.value.message
    client.files.delete(sent.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(sent.id)


def test_a_batch_job_attached_to_the_application_gets_the_same_answers(server: Server) -> None:
    from cast_ray.serve.client import ServeClient

    params = SamplingParams(max_tokens=12, temperature=0.8, seed=9)
    rows = [RowRequest(f"row {number}", f"t{number}", params) for number in range(40)]
    rows.append(RowRequest("too long", "t1 " * 600, params))
    *answers, refused = asyncio.run(ServeClient("cast-ray").generate(rows))
    expected = server.engine.generate([f"t{number}" for number in range(40)], params)
    assert [answer.text for answer in answers] == [one.text for one in expected]
    assert refused.error is not None
    assert refused.error.startswith("RequestError")
    wait_for(lambda: len(found := server.replicas()) == 2 and all(one["finished"]["batch"] for one in found))


def test_a_whole_job_may_be_attached_and_people_are_served_meanwhile(server: Server, tmp_path: Path) -> None:
    import io

    from rich.console import Console

    from cast_ray.batch.driver import JobConfig, run_job

    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text("\n".join(json.dumps({"id": number, "prompt": f"t{number % 64} t5"}) for number in range(60)))
    job = JobConfig(
        input=str(source), output=str(output), attach="cast-ray", engine=server.engine.config, max_tokens=20, seed=1
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_job, job, console=Console(file=io.StringIO()))
        while not running.done():
            answer = server.client().completions.create(model="tiny", prompt="t1", max_tokens=4, temperature=0)
            assert answer.choices[0].finish_reason == "length"
    summary = running.result()
    assert (summary["rows"], summary["answered"]) == (60, 60)
    rows = pq.read_table(sorted(output.rglob("*.parquet"))).sort_by("id").to_pylist()
    expected = server.engine.generate([row["prompt"] for row in rows], SamplingParams(max_tokens=20))
    assert [row["generated_text"] for row in rows] == [one.text for one in expected]
    wait_for(lambda: len(server.replicas()) == 2)


def test_a_killed_replica_costs_no_answer(server: Server) -> None:
    client = server.client()
    expected = server.engine.generate(["t8 t9"], SamplingParams(max_tokens=200, ignore_eos=True))[0].text
    body: Any = {"model": "tiny", "prompt": "t8 t9", "max_tokens": 200, "temperature": 0}

    def ask(_: int) -> str:
        # The queue for what is left may be full for a while: then a client comes again, as it is told.
        for _ in range(100):
            try:
                return client.completions.create(**body, extra_body={"ignore_eos": True}).choices[0].text
            except openai.InternalServerError as error:
                return f"{error.status_code} {error.code}"
            except openai.RateLimitError as error:
                time.sleep(int(error.response.headers["retry-after"]))
        return "never served"

    wait_for(lambda: len(server.replicas()) == 2)
    victim = server.replicas()[0]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, number) for number in range(8)]
        time.sleep(0.5)
        os.kill(victim["pid"], signal.SIGKILL)
        found = [answer.result(timeout=PATIENCE_S) for answer in answers]
    assert set(found) <= {expected, "503 engine_failed"}
    assert expected in found
    wait_for(lambda: len(server.replicas()) == 2 and victim["pid"] not in [one["pid"] for one in server.replicas()])
    assert ask(0) == expected
    wait_for(lambda: freed(server))


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
