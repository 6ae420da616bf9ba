"""What clients get back: OpenAI's response bodies and stream chunks, as plain dicts.

Beyond OpenAI's fields there are `usage.speculation` in every answer and, for those who ask, `round` in stream chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cast_ray.request import Completion, TokenLogprob
from cast_ray.serve.tagged import Part, TaggedText, read_tool_call

# JSON has no infinity; OpenAI gives this for what is as good as impossible.
LOWEST = -9999.0
Words = Mapping[int, str]


def usage(completions: Sequence[Completion], prompts: int = 1) -> dict[str, Any]:
    """Token counts of the samples of `prompts` prompts, each prompt counted once, and what speculation did."""
    samples = max(1, len(completions) // max(1, prompts))
    read = sum(one.num_input_tokens for one in completions[::samples])
    written = sum(len(one.token_ids) for one in completions)
    rounds = sum(one.stats.rounds for one in completions)
    committed = sum(one.stats.tokens_committed for one in completions)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "speculation": {
            "rounds": rounds,
            "mean_round_length": committed / rounds if rounds else 0.0,
            "nodes_verified": sum(one.stats.nodes_verified for one in completions),
            "draft_rounds": sum(one.stats.draft_rounds for one in completions),
        },
    }


def head(kind: str, answer_id: str, created: int, model: str) -> dict[str, Any]:
    """The fields that every body begins with. kind: `chat.completion`, `text_completion`, …"""
    return {"id": answer_id, "object": kind, "created": created, "model": model, "system_fingerprint": None}


def finish_reason(completion: Completion, called: bool = False) -> str:
    """OpenAI's word for it; an aborted answer is one that was cut."""
    return "tool_calls" if called else "stop" if completion.finish_reason == "stop" else "length"


def completion_choice(index: int, completion: Completion, words: Words | None) -> dict[str, Any]:
    """A choice of `/v1/completions`."""
    choice: dict[str, Any] = {
        "index": index,
        "text": completion.text,
        "logprobs": completion_logprobs(completion.logprobs, words or {}),
        "finish_reason": finish_reason(completion),
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
    }
    if completion.choice_probabilities is not None:
        choice["choice_probabilities"] = completion.choice_probabilities
    if completion.prompt_logprobs is not None:
        choice["prompt_logprobs"] = completion_logprobs(completion.prompt_logprobs, words or {})
    return choice


def chat_choice(index: int, completion: Completion, words: Words | None, reader: TaggedText) -> dict[str, Any]:
    """A choice of `/v1/chat/completions`. reader: a fresh one for this answer."""
    parts = [*reader.push(completion.text), *reader.finish()]
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    content, calls = "", []
    for part in parts:
        call = read_tool_call(part.text) if part.kind == "tool_call" else None
        if call is not None:
            calls.append(call)
        elif part.kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + part.text
        else:
            content += part.text
    if calls:
        message["tool_calls"] = calls
        content = content.strip()
    message["content"] = content if content or not calls else None
    choice = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(completion.logprobs, words or {}),
        "finish_reason": finish_reason(completion, bool(calls)),
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
    }
    if completion.choice_probabilities is not None:
        choice["choice_probabilities"] = completion.choice_probabilities
    return choice


def chat_delta(part: Part, calls: int) -> tuple[dict[str, Any], int]:
    """A stream chunk's `delta` for a part, and how many tool calls there are with it."""
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}, calls
    call = read_tool_call(part.text) if part.kind == "tool_call" else None
    if call is None:
        return {"content": part.text}, calls
    return {"tool_calls": [{"index": calls, **call}]}, calls + 1


def completion_logprobs(
    rows: Sequence[TokenLogprob | None] | None, words: Words, place: int = 0
) -> dict[str, Any] | None:
    """The old form: parallel lists. place: characters of the tokens before these."""
    if rows is None:
        return None
    texts = [words.get(row.token_id, "") if row is not None else "" for row in rows]
    offsets = []
    for text in texts:
        offsets.append(place)
        place += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(row.logprob) if row is not None else None for row in rows],
        "top_logprobs": [
            {words.get(token, ""): _finite(value) for token, value in row.top} if row is not None else None
            for row in rows
        ],
        "text_offset": offsets,
    }


def chat_logprobs(rows: Sequence[TokenLogprob] | None, words: Words) -> dict[str, Any] | None:
    """The new form: one object a token."""
    if rows is None:
        return None
    return {"content": [_row(row, words) for row in rows], "refusal": None}


def _row(row: TokenLogprob, words: Words) -> dict[str, Any]:
    return {
        **_token(words.get(row.token_id, ""), row.logprob),
        "top_logprobs": [_token(words.get(token, ""), value) for token, value in row.top],
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "surrogatepass"))}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST
