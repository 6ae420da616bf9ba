"""The device check runs whole on tiny shapes on a CPU, and a part that fails keeps what it had measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cast_ray.models.attention.flashinfer import FlashInferBackend
from tests.unit.models.attention import interpreter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_all_parts_run_on_tiny_shapes(tmp_path: Path) -> None:
    to = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "device_check.py"), "--tiny", "--to", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(to.read_text())["parts"]
    assert set(parts) == {"backends", "splits", "graphs", "qwen3-8b", "qwen3-4b"}
    assert not any("error" in part or "skipped" in part for part in parts.values())
    assert {row["planned"] for row in parts["backends"]["cases"]} == {"eager", "for capture"}
    assert "not_measured" in parts["splits"]["split_from"], "a CPU says nothing of it"
    assert all(row["ok"] for name in ("verify", "draft") for row in parts["graphs"][name])
    # Captured forwards are replayed, and every method says what the target alone would say.
    assert parts["qwen3-8b"]["graphs"]["replays"] > 20
    decoded = parts["qwen3-8b"]["decode"]
    assert decoded[0]["method"] == "ar"
    assert decoded[0]["round_length"] == 1.0
    assert all(row["exact"] for row in decoded)
    assert "tokens_per_s" in done.stdout


def test_a_part_that_fails_keeps_its_results_and_names_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import device_check
    from on_device import equality
    from on_device.part import Part

    def fails(part: Part) -> None:
        part.append("cases", {"apart": 0.0, "ok": True})
        raise RuntimeError("device lost")

    monkeypatch.setattr(equality, "backends", fails)
    report = device_check.check(tmp_path / "report.json", True, ["backends", "graphs"], None)
    assert report["parts"]["backends"]["cases"] == [{"apart": 0.0, "ok": True}]
    assert report["parts"]["backends"]["error"] == "RuntimeError: device lost"
    assert "error" not in report["parts"]["graphs"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    device_check.show(report)
    assert "device lost" in capsys.readouterr().out


def test_both_sides_of_the_split_are_timed_by_rows_and_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from on_device import splitting
    from on_device.part import Part

    made: list[int | None] = []

    def make(least: int | None) -> FlashInferBackend:
        made.append(least)
        return FlashInferBackend(splitting.PAGE, torch.device("cpu"), interpreter, split_from=least)

    part = Part(tmp_path / "part.json", 60.0, tiny=True)
    splitting.split_table(part, make, splitting.Heads(4, 2, 16), contexts=(20, 60, 200), loads=((1, 7), (2, 5)))
    found = json.loads((tmp_path / "part.json").read_text())
    assert [(row["rows"], row["context"]) for row in found["split"]] == [(r, c) for r in (8, 12) for c in (20, 60, 200)]
    assert all(row["whole_ms"] > 0 and row["split_ms"] > 0 for row in found["split"])
    assert made == [None, 0] * 6
    for rows, least in found["split_from"]["faster_from_by_rows"].items():
        # From there on it is faster in every context, and in the one before it is not.
        of_rows = [row for row in found["split"] if str(row["rows"]) == rows]
        slower = [row["context"] for row in of_rows if row["split_ms"] >= row["whole_ms"]]
        assert least == min(
            (row["context"] for row in of_rows if row["context"] > max(slower, default=0)), default=None
        )


def test_scripted_acceptance_brings_the_round_lengths_that_it_is_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import torch
    from on_device.scripted import CHAIN_LENGTH, TREE_LENGTH, fit_rates

    from cast_ray.trees.pack import DraftScores, pack

    rates = fit_rates(15)
    q = rates.probabilities(torch.randn(2000, generator=torch.Generator().manual_seed(3)), 32)
    assert (q.sum(dim=1) <= 1 + 1e-5).all()
    chain = 1 + float((q[:, :1] ** torch.arange(1, 16)).sum(dim=1).mean())
    scores = q.log()[:, None].expand(-1, 15, -1).contiguous()
    ids = torch.arange(32).expand_as(scores).contiguous()
    tree = 1 + float(pack(DraftScores(scores, ids), 127).masses.sum(dim=1).mean())
    assert chain == pytest.approx(CHAIN_LENGTH, rel=0.06)
    assert tree == pytest.approx(TREE_LENGTH, rel=0.06)
