"""The command refuses what it cannot do with one line and exit code 2, before anything starts or is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cast_ray import cli
from cast_ray.batch import driver
from cast_ray.batch.job import JobConfig
from cast_ray.errors import EngineError
from cast_ray.stats import report


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
        ("in.doc", "why\n", (), "unknown extension '.doc'"),
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

    def keep(config: JobConfig) -> dict[str, Any]:
        configs.append(config)
        return {"projected_s": None}

    monkeypatch.setattr(driver, "run_job", keep)
    monkeypatch.setattr(report, "render", lambda summary: "the report")
    assert run(monkeypatch, "generate") == 0
    assert run(monkeypatch, "generate", "--width", "chain", "--replicas", "2", "--temperature", "0.5") == 0
    assert configs[0] == JobConfig()
    assert configs[1] == JobConfig(engine={"width": "chain"}, pool={"replicas": 2}, temperature=0.5)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (("--choices", "yes, no", "--choice-probabilities"), {"choices": ["yes", "no"], "choice_probabilities": True}),
        (("--choices", '["a, b", "c"]'), {"choices": ["a, b", "c"]}),
        (("--sampling", "top_p=0.9,top_k=40"), {"sampling": {"top_p": 0.9, "top_k": 40}}),
        (("--sampling", "{stop: [END]}"), {"sampling": {"stop": ["END"]}}),
        (("--chat-template-kwargs", "{enable_thinking: false}"), {"chat_template_kwargs": {"enable_thinking": False}}),
        (("--set", "engine.threads=2", "--set", "pool.row_attempts=1", "--set", "batch_size=4"),
         {"engine": {"threads": 2}, "pool": {"row_attempts": 1}, "batch_size": 4}),
        (("--template", "Label: {{ text }}", "--system", "Be brief.", "--no-chat"), None),
        (("--no-chat", "--regex", "[0-9]+"), {"chat": False, "regex": "[0-9]+"}),
    ],
)  # fmt: skip
def test_flags_become_the_settings_they_name(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], settings: dict[str, Any] | None
) -> None:
    configs: list[JobConfig] = []
    monkeypatch.setattr(driver, "run_job", lambda config: configs.append(config) or {"projected_s": None})
    monkeypatch.setattr(report, "render", lambda summary: "the report")
    code = run(monkeypatch, "generate", *arguments)
    if settings is None:
        assert code == 2  # a system message needs a chat
    else:
        assert configs == [JobConfig(**settings)]


def test_a_pilot_ends_with_the_projected_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "run_job", lambda config: {"projected_s": 7384.0, "rows_left": 900})
    monkeypatch.setattr(report, "render", lambda summary: "the report")
    assert run(monkeypatch, "generate", "--limit", "10") == 0
    assert "900 rows are left: about 2 h 3 min at this rate" in capsys.readouterr().out


def test_a_failure_while_running_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise EngineError("no engine is left\n(why)")

    monkeypatch.setattr(driver, "run_job", fail)
    assert run(monkeypatch, "generate") == 1
    assert capsys.readouterr().err == "error: no engine is left (why)\n"


def test_the_help_shows_every_option_with_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("Most new tokens a row (default 256)", "0 is greedy (default 0.0)", "--messages-column", "Examples:"):
        assert words in shown


def test_a_job_is_not_attached_to_a_cluster_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "why"}\n')
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("a cluster was started"))
    assert (
        run(monkeypatch, "generate", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "o", "--attach", "app")
        == 2
    )
    assert "attach='app': the application's cluster is not named. Set RAY_ADDRESS" in capsys.readouterr().err
