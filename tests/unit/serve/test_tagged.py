"""Reasoning and tool calls are told apart the same way, however the text is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cast_ray.serve.tagged import Part, TaggedText, read_tool_call

CALL = '{"name": "look", "arguments": {"where": "<here>"}}'
TEXT = f"<think>\nhm < 3</think>\n\nI look.<tool_call>\n{CALL}\n</tool_call><tool_call>no json</tool_call> done"


def joined(parts: list[Part]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in parts:
        if found and found[-1][0] == part.kind != "tool_call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


def read(pieces: list[str], **options: bool) -> list[tuple[str, str]]:
    reader = TaggedText(**{"reasoning": True, "tools": True, **options})
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined(parts + reader.finish())


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_the_parts_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[start:end] for start, end in pairwise(places)]
    assert read(pieces) == [
        ("reasoning", "hm < 3"),
        ("content", "I look."),
        ("tool_call", f"\n{CALL}\n"),
        ("tool_call", "no json"),
        ("content", "done"),
    ]


def test_what_is_not_looked_for_stays_in_the_content() -> None:
    assert read([TEXT], reasoning=False, tools=False) == [("content", TEXT)]
    assert read(["a <thin", "g> b"]) == [("content", "a <thing> b")]


def test_a_prompt_may_end_inside_the_reasoning() -> None:
    reader = TaggedText(reasoning=True, tools=False, thinking=True)
    assert joined([*reader.push("so it is</think>yes"), *reader.finish()]) == [
        ("reasoning", "so it is"),
        ("content", "yes"),
    ]


def test_a_call_that_is_cut_short_is_shown_as_it_stands() -> None:
    assert read(["<tool_call>", CALL]) == [("tool_call", CALL)]
    assert read(['<tool_call>{"name": "lo']) == [("content", '<tool_call>{"name": "lo')]


def test_calls_have_openais_form() -> None:
    call = read_tool_call(CALL)
    assert call is not None
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"where": "<here>"}
    assert read_tool_call("[1]") is None
    assert read_tool_call('{"name": 1}') is None
    assert read_tool_call("[" * 100_000) is None
