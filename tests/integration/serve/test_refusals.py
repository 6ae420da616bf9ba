"""What clients of a live Ray Serve are refused, as OpenAI does, and that nothing leaks with it."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import openai
import pytest

from tests.serving import LONG, PATIENCE_S, Server, freed, wait_for

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


def test_a_deadline_ends_a_request(server: Server) -> None:
    body = {"model": "tiny", "prompt": "t1", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.05"})
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        bad = http.post("/v1/completions", json=body, headers={"x-request-timeout": "soon"})
        assert bad.status_code == 400
    wait_for(lambda: freed(server))
