"""The command refuses what it cannot do with one line and exit code 2, before anything starts or is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cast_ray import cli
from cast_ray.batch.driver import JobConfig
from cast_ray.errors import EngineError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of the console script."""
    monkeypatch.setattr(sys, "argv", ["cast-ray", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("absent.jsonl", None, (), "does not exist"),
        ("in.jsonl", '{"question": "why"}\n', (), "none of them is messages, prompt or text"),
        ("in.jsonl", '{"question": "why"}\n', ("--prompt-column", "ask"), "Columns there: question"),
        ("in.jsonl", "", (), "has no rows"),
        ("in.txt", "why\n", (), "unknown extension '.txt'"),
        ("in.jsonl", '{"prompt": "why", "error": 1}\n', (), "['error']: is also written by the job"),
        ("in.jsonl", '{"prompt": "why"}\n', ("--max-tokens", "0"), "max_tokens=0"),
        ("in.jsonl", '{"prompt": "why"}\n', ("--temperature", "inf"), "error: temperature=inf: must be 0 (greedy) or"),
        ("in.jsonl", '{"prompt": "why"}\n', ("--config", "absent.yaml"), "absent.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    options: tuple[str, ...],
    message: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)

    code = run(monkeypatch, "generate", "--input", tmp_path / name, "--output", tmp_path / "out", *options)

    shown = capsys.readouterr().err
    assert code == 2
    assert message in shown
    assert len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_was_not_said_keeps_its_default_and_what_was_said_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[JobConfig] = []
    monkeypatch.setattr(cli, "run_job", configs.append)
    monkeypatch.setattr(cli, "render", lambda summary: "the report")
    assert run(monkeypatch, "generate") == 0
    assert run(monkeypatch, "generate", "--width", "chain", "--replicas", "2", "--temperature", "0.5") == 0
    assert configs[0] == JobConfig()
    assert configs[1] == JobConfig(engine={"width": "chain"}, pool={"replicas": 2}, temperature=0.5)


def test_a_failure_while_running_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise EngineError("no engine is left\n(why)")

    monkeypatch.setattr(cli, "run_job", fail)
    assert run(monkeypatch, "generate") == 1
    assert capsys.readouterr().err == "error: no engine is left (why)\n"


def test_the_help_shows_every_option_with_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("Most new tokens a row (default 256)", "0 is greedy (default 0.0)", "--messages-column", "Examples:"):
        assert words in shown
