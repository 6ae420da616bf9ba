"""OpenAI Batch files: a line of one is a request, a line of its result file an answer or an error.

Only the shapes; the form of a request's body is `SamplingParams.from_dict`'s to know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cast_ray.batch.prepare import read_messages
from cast_ray.errors import RequestError, describe
from cast_ray.request import Prompt

CUSTOM_ID = "custom_id"
COLUMNS = (CUSTOM_ID, "method", "url", "body")
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
# Of a body, what says nothing of how the answer is to be generated.
_IGNORED = frozenset(
    {
        "messages",
        "prompt",
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)


def is_openai_batch(columns: Iterable[str]) -> bool:
    return set(COLUMNS) <= set(columns)


def read_request(row: dict[str, Any]) -> tuple[Prompt, dict[str, Any]]:
    """The prompt and the sampling values of a line whose body is JSON text. Raises RequestError."""
    method, url = row.get("method"), row.get("url")
    if method not in (None, "POST"):
        raise RequestError(describe("method", method, "is not POST", "Write POST"))
    if url not in (CHAT_URL, TEXT_URL):
        raise RequestError(describe("url", url, "is no endpoint of this job", f"Use {CHAT_URL} or {TEXT_URL}"))
    if row.get(CUSTOM_ID) in (None, ""):
        raise RequestError(describe(CUSTOM_ID, row.get(CUSTOM_ID), "names no request", "Give each line its own"))
    body = row.get("body")
    body = json.loads(body) if isinstance(body, str) else body
    if not isinstance(body, dict):
        raise RequestError(describe("body", body, "is no object", 'Write {"model": ..., "messages": [...]}'))
    if body.get("stream"):
        raise RequestError(describe("body.stream", body["stream"], "has no meaning in a file", "Leave it out"))
    values = {name: value for name, value in body.items() if name not in _IGNORED and name != "stream"}
    if url == CHAT_URL:
        return read_messages("body.messages", body.get("messages")), values
    return _text_prompt(body.get("prompt")), values


def _text_prompt(prompt: Any) -> Prompt:
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not is_ids and not (isinstance(prompt, str) and prompt.strip()):
        raise RequestError(describe("body.prompt", prompt, "is neither text nor token ids", "Write one prompt a line"))
    return prompt


def result_line(row: dict[str, Any], name: str, created: int) -> dict[str, Any]:
    """The line of the result file (or, where the row has an error, of the error file) for a row with its answers.

    row: list-valued output columns. name: of the row, unique in the job. created: Unix seconds.
    """
    line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": row.get(CUSTOM_ID, name)}
    if row["error"] is not None:
        code, _, message = row["error"].partition(": ")
        return {**line, "response": None, "error": {"code": code, "message": message}}
    body = row.get("body")
    body = json.loads(body) if isinstance(body, str) else {}
    is_chat = row.get("url", CHAT_URL) == CHAT_URL
    answer = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": str(body.get("model") or "cast_ray"),
        "choices": [_choice(row, index, is_chat) for index in range(len(row["generated_text"]))],
        "usage": _usage(row["num_input_tokens"], sum(row["num_generated_tokens"])),
    }
    return {**line, "response": {"status_code": 200, "request_id": f"req_{name}", "body": answer}, "error": None}


def _choice(row: dict[str, Any], index: int, is_chat: bool) -> dict[str, Any]:
    text = row["generated_text"][index]
    reason = row["finish_reason"][index]
    choice = {"index": index, "finish_reason": reason if reason == "length" else "stop", "logprobs": None}
    if is_chat:
        return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}
    return {**choice, "text": text}


def _usage(read: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}
