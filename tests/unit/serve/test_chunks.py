"""Chunks of a stream: log probabilities come with their tokens, whether there is text to show yet or not."""

from __future__ import annotations

from typing import Any

from cast_ray.config import ServeLimits
from cast_ray.request import Completion, RequestStats, TokenLogprob
from cast_ray.serve.answers import question_of
from cast_ray.serve.chunks import ChunkWriter
from cast_ray.serve.protocol import ChatRequest, CompletionRequest
from cast_ray.serve.wire import Piece

ROWS = (TokenLogprob(1, -0.5), TokenLogprob(2, -1.5))
WORDS = {1: "ab", 2: "c"}
DONE = Completion("r", "abc", [1, 2], "length", 1, None, RequestStats())


def choices(request: Any, pieces: list[Piece]) -> list[dict[str, Any]]:
    writer = ChunkWriter(question_of(request, ServeLimits(), "m"))
    return [chunk["choices"][0] for piece in pieces for chunk in writer.chunks(0, piece)]


def test_a_piece_without_text_shows_its_log_probabilities_all_the_same() -> None:
    request = CompletionRequest(model="m", prompt="x", logprobs=0, stream=True)
    held = Piece("", (1,), 1, logprobs=ROWS[:1], words=WORDS)
    last = Piece("abc", (2,), 1, logprobs=ROWS[1:], words=WORDS, completion=DONE)
    first, second, ending = choices(request, [held, last])
    assert (first["text"], first["logprobs"]["tokens"], first["logprobs"]["text_offset"]) == ("", ["ab"], [0])
    assert (second["text"], second["logprobs"]["tokens"], second["logprobs"]["text_offset"]) == ("abc", ["c"], [2])
    assert ending["logprobs"] is None
    assert ending["finish_reason"] == "length"


def test_a_chats_first_chunk_of_a_piece_has_them_once() -> None:
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], logprobs=True, stream=True)
    pieces = [
        Piece("", (1,), 1, logprobs=ROWS[:1], words=WORDS),
        Piece("abc", (2,), 1, logprobs=ROWS[1:], words=WORDS, completion=DONE),
    ]
    found = choices(request, pieces)
    shown = [[row["token"] for row in one["logprobs"]["content"]] for one in found if one["logprobs"]]
    assert shown == [["ab"], ["c"]]
    assert found[0]["delta"] == {}
    assert found[1]["delta"] == {"content": "abc"}


def test_nobody_who_did_not_ask_gets_any_or_an_empty_chunk() -> None:
    request = CompletionRequest(model="m", prompt="x", stream=True)
    assert choices(request, [Piece("", (1,), 1)]) == []
    (one,) = choices(request, [Piece("ab", (1,), 1)])
    assert one["logprobs"] is None
