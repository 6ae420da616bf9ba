"""The answers' shards: the same whatever is killed, and a larger job keeps those of a smaller one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cast_ray.pool.rows import RowRequest
from cast_ray.training import answers as answers_module
from cast_ray.training.answers import read_answers, write_answers
from cast_ray.training.config import TrainConfig
from cast_ray.training.engines import Ask, Written
from cast_ray.training.prompts import TrainingPrompt
from cast_ray.training.shards import Answer

GIVEN = [TrainingPrompt(f"{i:03d}", "ab"[i % 2], f"given prompt {i}") for i in range(200)]

REFUSED = {f"{i:03d}" for i in range(0, 200, 20)}  # prompts that cannot be answered


class _Words:
    """A tokenizer of one token a character, without a chat template."""

    chat_template = None
    eos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text] or [1]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(t) for t in tokens if t > 1)


class _Killed(Exception):
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[RowRequest]]:
    """Engines that answer any prompt by its seed, and note what they were asked."""
    calls: list[list[RowRequest]] = []

    async def ask(rows: list[RowRequest]) -> list[Written | None]:
        calls.append(rows)
        return [_write(row) for row in rows]

    @asynccontextmanager
    async def engines(config: TrainConfig) -> AsyncIterator[Ask]:
        yield ask

    monkeypatch.setattr(answers_module, "local_engine", engines)
    return calls


def _write(row: RowRequest) -> Written | None:
    prompt = row.prompt if isinstance(row.prompt, list) else [ord(c) for c in row.prompt]
    if row.row_id in REFUSED:
        return None
    assert row.params.seed is not None
    text = f" number {row.params.seed % 10**6}."
    return Written(list(prompt), [ord(c) for c in text], "stop")  # type: ignore[arg-type]


def _config(work: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{"work": work, "held_out": 10, "answers": 192, "own_share": 0.25, **changes})


def _all(work: Path) -> dict[str, list[Answer]]:
    return {
        f"{folder}/{number}": found
        for folder in ("held_out", "answers")
        for number, found in read_answers(work, folder)
    }


def _fill(config: TrainConfig, given: list[TrainingPrompt] = GIVEN) -> None:
    write_answers(config, given, _Words(), lambda *_: None)


def test_shards_hold_given_and_own_prompts_and_none_twice(tmp_path: Path, asked: list[Any]) -> None:
    _fill(_config(tmp_path))
    shards = _all(tmp_path)
    assert list(shards) == ["held_out/0", "answers/1", "answers/2", "answers/3"]
    found = [answer for part in shards.values() for answer in part]
    assert len({a.name for a in found}) == len(found)
    given = [a for a in found if not a.name.startswith("own-")]
    assert 4 * 48 - len(REFUSED) <= len(given) < 4 * 48
    assert not REFUSED & {a.name for a in given}
    assert {a.domain for a in found} == {"a", "b", "chat", "code", "maths"}
    assert 0.3 < sum(a.temperature > 0 for a in found) / len(found) < 0.7


def test_a_killed_job_ends_with_the_same_answers(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(_config(tmp_path / "whole"))
    plain = answers_module.write_whole
    writes = 0

    def fragile(path: Path, write: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise _Killed
        plain(path, write)

    monkeypatch.setattr(answers_module, "write_whole", fragile)
    with pytest.raises(_Killed):
        _fill(_config(tmp_path / "killed"))
    before = len(_all(tmp_path / "killed"))
    assert 0 < before < 4
    asked.clear()
    _fill(_config(tmp_path / "killed"))
    assert len(asked) == 2 * (4 - before)  # own prompts and answers of the missing shards, nothing else
    assert _all(tmp_path / "killed") == _all(tmp_path / "whole")
    asked.clear()
    _fill(_config(tmp_path / "killed"))
    assert not asked


def test_a_larger_job_goes_on_behind_a_smaller_one(tmp_path: Path, asked: list[Any]) -> None:
    _fill(_config(tmp_path / "grown", answers=64))
    _fill(_config(tmp_path / "grown", answers=320))
    _fill(_config(tmp_path / "once", answers=320))
    assert _all(tmp_path / "grown") == _all(tmp_path / "once")
    last = _all(tmp_path / "once")["answers/5"]
    assert all(answer.name.startswith("own-") for answer in last)  # the given ones are used up


def test_without_prompts_the_target_writes_them_all(tmp_path: Path, asked: list[Any]) -> None:
    _fill(_config(tmp_path, answers=64, own_share=0.5), given=[])
    assert all(answer.name.startswith("own-") for part in _all(tmp_path).values() for answer in part)


def test_steps_that_use_little_ask_for_little() -> None:
    assert TrainConfig(steps=50, sequences=8).wanted_answers(7000) == 200
    assert TrainConfig(minutes=5).wanted_answers(20) == 1000
    assert TrainConfig(minutes=5).wanted_answers(7000) == 7000
    assert TrainConfig(steps=50, answers=9).wanted_answers(7000) == 9
