"""`cast-ray check` says that a pair decodes the target's own output, and says so when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cast_ray.cli import app
from cast_ray.engine import emission
from cast_ray.stats.comparison import SPACINGS, TIE, Comparison, tolerance
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "target", qwen3(), spread=2.0)
    save_tiny_drafter(folder / "drafter", target=qwen3())
    rows = [{"prompt": f"t{i} t{i + 1} t3"} for i in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def call(pair: Path, *more: str, drafter: str | None = None) -> Any:
    models = ["--target", str(pair / "target"), "--drafter", drafter or str(pair / "drafter")]
    sizes = ["--count", "3", "--max-tokens", "9", "--batches", "3", "--seeds", "1", "--prompts"]
    settings = ["--dtype", "float32", "--device", "cpu", *more]
    return CliRunner().invoke(app, ["check", *models, *sizes, str(pair / "prompts.jsonl"), *settings])


def test_a_sound_pair_passes_at_every_width_and_batch(pair: Path) -> None:
    result = call(pair, "--widths", "chain,fixed:7")
    assert result.exit_code == 0, result.output
    assert "The output is the target's own" in result.output
    assert "generate" in result.output
    # ar in a batch and two widths alone and in one, each greedy and sampled; and ar alone against generate.
    rows = [line.split() for line in result.output.splitlines() if line.split()[:1] in (["ar"], ["chain"], ["fixed:7"])]
    assert len(rows) == 1 + 2 * (1 + 2 * 2)
    assert all(row[-1] == "0" for row in rows)
    assert "T=0.8 seed 0" in result.output


def test_without_a_drafter_batches_are_compared(pair: Path) -> None:
    result = call(pair, "--widths", "fixed:7", drafter="none")
    assert result.exit_code == 0, result.output
    assert "fixed:7" not in result.output


def test_another_output_is_a_failure_that_says_where(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = emission.choose_tokens

    def wrong_in_trees(logits: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return choose(logits.roll(1, dims=-1) if logits.shape[0] > 3 else logits, *rest, **more)

    monkeypatch.setattr(emission, "choose_tokens", wrong_in_trees)
    result = call(pair, "--widths", "fixed:7")
    assert result.exit_code == 1, result.output
    assert "NOT the target's own" in result.output
    assert "First: fixed:7, batch 1" in result.output


@pytest.mark.parametrize("batches", ["0", "two", "1,-3"])
def test_batches_that_are_none_are_named(pair: Path, batches: str) -> None:
    result = CliRunner().invoke(app, ["check", "--batches", batches, "--prompts", str(pair / "prompts.jsonl")])
    assert result.exit_code == 2
    assert "batches" in result.output


class Fixed(torch.nn.Module):
    """A model that gives the same logits behind any prefix."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.row = logits

    def forward(self, prefix: torch.Tensor) -> Any:
        return type("Output", (), {"logits": self.row.expand(1, prefix.shape[1], -1)})


def test_only_a_near_tie_excuses_another_token() -> None:
    for second, ties, differences in ((3.0 - TIE / 2, 1, 0), (3.0 - 2 * TIE, 0, 1)):
        model, comparison = Fixed(torch.tensor([0.0, 3.0, second])), Comparison()
        comparison.add(model, [1], [2, 0, 0], [1, 1, 1])
        assert (comparison.tokens, comparison.ties, len(comparison.differences)) == (1, ties, differences)
        assert comparison.holds == (not differences)
    comparison = Comparison()
    comparison.add(Fixed(torch.tensor([3.0, 3.0, 2.99999])), [1], [2], [0])
    assert comparison.differences, "of a tie of three the third is none of the two best"
    comparison = Comparison()
    comparison.add(Fixed(torch.zeros(3)), [1], [2], [2, 2])
    assert comparison.differences == ["1 tokens, the reference has 2"]
    comparison = Comparison()
    for _ in range(3):
        comparison.add(Fixed(torch.tensor([0.0, 3.0, 3.0])), [1], [2], [1])
    assert not comparison.holds, "three near-ties in three tokens are no chance"


def test_sixteen_bits_tie_within_some_spacings_of_the_largest_logit() -> None:
    logits = torch.tensor([[-16.0, 2.0]])
    assert tolerance(logits, 0.5) == TIE
    assert tolerance(logits.bfloat16(), 0.0) == SPACINGS * 2**-7 * 16
    assert tolerance(logits.bfloat16(), 0.5) == 2 * SPACINGS * 2**-7 * 16
