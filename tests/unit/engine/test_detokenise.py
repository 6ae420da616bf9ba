"""Streamed text is the text of all tokens, in valid UTF-8, and stop strings are found wherever they lie."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cast_ray.engine.detokenise import REPLACEMENT, IncrementalDetokeniser, OutputText, StopChecker
from tests.byte_tokenizer import byte_level

TEXTS = [
    "Hello, world",
    "naïve café",
    "日本語のテキスト",
    "🤷🏽‍♀️ ok 👩‍👩‍👧",
    "  two  spaces ",
    "a\n\n\tb",
    "عربى",
    "\x00\x1f",
]


@lru_cache
def byte_fallback() -> Any:
    """Words with Llama's underscores, bytes for the rest, the first space dropped; and a special token."""
    words = ["▁", "▁the", "the", "▁a", "b", "é", "日"]
    vocab = {token: i for i, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + words)}
    inner = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@lru_cache
def word_pieces() -> Any:
    """BERT's pieces: what follows decides about spaces."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "hel", "##lo", "world", ".", ",", "n", "'", "t"])}
    inner = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def whole(tokenizer: Any, ids: list[int], skip: bool) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def pieces(ids: list[int], rng: random.Random) -> list[list[int]]:
    out = []
    while ids:
        size = rng.randint(1, 5)
        out.append(ids[:size])
        ids = ids[size:]
    return out


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([byte_level, byte_fallback, word_pieces]), st.booleans(), st.integers(0, 99))
def test_streamed_text_is_the_text_of_all_tokens(data: st.DataObject, make: Any, skip: bool, cut: int) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    detokeniser = IncrementalDetokeniser(tokenizer, skip_special_tokens=skip)
    streamed = [detokeniser.push(piece) for piece in pieces(ids, random.Random(cut))]
    assert "".join(streamed) + detokeniser.flush() == whole(tokenizer, ids, skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(TEXTS), st.integers(0, 99))
def test_no_piece_of_a_valid_text_has_half_a_character(text: str, cut: int) -> None:
    text = text.replace(REPLACEMENT, "")
    tokenizer = byte_level()
    ids = tokenizer(text)["input_ids"]
    detokeniser = IncrementalDetokeniser(tokenizer)
    streamed = [detokeniser.push(piece) for piece in pieces(ids, random.Random(cut))]
    assert "".join(streamed) == text, "the last character is complete: nothing is left to flush"
    assert not any(REPLACEMENT in piece for piece in streamed)
    assert detokeniser.flush() == ""


def test_special_tokens_are_shown_or_skipped_as_asked() -> None:
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<end>")
    ids = [*tokenizer("a")["input_ids"], end, *tokenizer(" b")["input_ids"]]
    for skip, text in ((True, "a b"), (False, "a<end> b")):
        output = OutputText(tokenizer, skip_special_tokens=skip)
        for token in ids:
            output.push([token])
        output.finish()
        assert output.text == text


def test_an_unfinished_character_at_the_end_is_a_replacement() -> None:
    tokenizer = byte_level()
    ids = tokenizer("日")["input_ids"][:-1]
    detokeniser = IncrementalDetokeniser(tokenizer)
    assert detokeniser.push(ids) == ""
    assert detokeniser.flush() == whole(tokenizer, ids, True)


def slow_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(found), end
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab\n", max_size=20),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_stop_string_is_found_wherever_the_pieces_part(text: str, stops: list[str], include: bool, cut: int) -> None:
    rng = random.Random(cut)
    checker = StopChecker(stops, include)
    shown, rest = "", text
    while rest and not checker.stopped:
        size = rng.randint(1, 4)
        shown += checker.push(rest[:size])
        rest = rest[size:]
        # What was shown can never be part of the stop string that comes.
        expected = slow_stop(text, stops)
        assert expected is None or include or len(shown) <= expected[0]
    shown += checker.flush()
    expected = slow_stop(text, stops)
    assert checker.stopped == (expected is not None)
    assert shown == (text if expected is None else text[: expected[1] if include else expected[0]])


@pytest.mark.parametrize("sizes", [[99], [1] * 20, [2, 3, 4, 5, 6], [7, 7, 7]])
def test_the_output_ends_with_the_token_that_completes_the_stop_string(sizes: list[int]) -> None:
    tokenizer = byte_level()
    ids = tokenizer("One.\n\nTwo.")["input_ids"]
    for include, text in ((False, "One"), (True, "One.\n\n")):
        output = OutputText(tokenizer, stop=[".\n\n"], include_stop_str_in_output=include)
        kept, rest = 0, ids
        for size in sizes:
            kept += output.push(rest[:size])[1]
            rest = rest[size:]
            if output.stopped:
                break
        assert output.finish() == ""
        assert (output.text, kept) == (text, 6)


def test_stop_strings_within_the_first_min_tokens_do_not_count() -> None:
    tokenizer = byte_level()
    ids = tokenizer("x.x.x.x.")["input_ids"]
    output = OutputText(tokenizer, stop=["x."], min_tokens=3)
    shown, kept = output.push(ids)
    assert (shown, kept, output.stopped) == ("x.", 4, True)


def test_text_that_only_looked_like_a_stop_string_comes_at_the_end() -> None:
    output = OutputText(byte_level(), stop=["abc"])
    assert output.push(byte_level()("xab")["input_ids"]) == ("x", 3)
    assert output.finish() == "ab"
    assert output.text == "xab"
