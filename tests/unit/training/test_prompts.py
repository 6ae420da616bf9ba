"""Which prompts a training job has, and how the target's own begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from cast_ray.errors import InputError
from cast_ray.training.prompts import OPENINGS, TrainingPrompt, interleave, opening, read_prompts, turn_opening


def test_prompts_are_read_with_their_domains(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "one\\u2028line"}\n\n{"messages": [{"role": "user", "content": "two"}], "domain": "maths"}\n',
        encoding="utf-8",
    )
    first, second = read_prompts(path)
    assert (first.prompt, first.domain) == ("one\u2028line", "mine")
    assert (second.prompt, second.domain) == ([{"role": "user", "content": "two"}], "maths")
    assert first.name != second.name


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "bad.jsonl:1.*no JSON"), ('{"text": "x"}', "neither messages nor prompt"), ("\n", "holds no prompt")],
)
def test_a_bad_file_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_prompts(path)


def test_every_beginning_of_the_list_holds_all_domains_alike() -> None:
    prompts = [TrainingPrompt(f"{d}{i}", d, "x") for d, n in (("a", 50), ("b", 10), ("c", 3)) for i in range(n)]
    mixed = interleave(prompts, seed=1)
    assert sorted(p.name for p in mixed) == sorted(p.name for p in prompts)
    assert [p.domain for p in mixed[:9]] == ["a", "b", "c"] * 3
    assert [p.domain for p in mixed[9:13]] == ["a", "b", "a", "b"]
    assert [p.name for p in mixed] != [p.name for p in interleave(prompts, seed=2)]


class _Tokenizer:
    """One token a character; a chat template of its own."""

    eos_token_id = 7

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return f"<system>be nice</system><user>{messages[0]['content']}</user>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": ([1] if add_special_tokens else []) + [ord(c) for c in text]}


def test_an_opening_is_the_template_s_own_up_to_the_user_s_text() -> None:
    tokenizer = _Tokenizer("yes")
    assert turn_opening(tokenizer) == "<system>be nice</system><user>"
    starts = [opening(tokenizer, 0, number) for number in range(60)]
    assert {domain for domain, _, _ in starts} == set(OPENINGS)
    assert len({text for _, text, _ in starts}) > 15
    for domain, text, tokens in starts:
        assert text in OPENINGS[domain]
        assert "".join(map(chr, tokens)) == "<system>be nice</system><user>" + text


def test_without_a_template_an_opening_is_plain_text() -> None:
    for number in range(30):
        _, text, tokens = opening(_Tokenizer(None), 0, number)
        assert tokens == [1, *map(ord, text)]
