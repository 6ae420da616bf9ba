"""A live Ray Serve under load: queues, clients that go, batches, jobs that attach, a replica that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest

from cast_ray.pool.rows import RowRequest
from cast_ray.request import SamplingParams
from tests.serving import LONG, PATIENCE_S, Server, freed, wait_for


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
