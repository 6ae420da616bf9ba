"""A bad drafter is found out and left out, and the commands that measure and explain do so on real engines."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.cli import app
from cast_ray.drafters.checkpoint import find_drafter
from cast_ray.drafters.dflash import DFlashDrafter
from cast_ray.drafters.pair import ACCEPTANCE, RECORD, pair_record, recorded_acceptance
from cast_ray.errors import ConfigError
from cast_ray.models.loading import load_target
from cast_ray.stats import sweep as sweep_module
from cast_ray.stats.acceptance import drafter_of, record_of
from cast_ray.stats.plots import require_matplotlib
from cast_ray.stats.sweep_log import SweepLog
from cast_ray.trees.pack import DraftScores
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

SAMPLES = Path(find_drafter("embedded")).parents[1] / "sample_prompts.jsonl"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, a random drafter for it with its record, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny_model(folder / "target", qwen3())
    config = save_tiny_drafter(folder / "drafter", target=qwen3()) / "config.json"
    raw = json.loads(config.read_text())
    loaded = load_target(str(target), torch.float32, torch.device("cpu"))
    config.write_text(json.dumps({**raw, RECORD: pair_record(raw, loaded)}))
    rows = [{"prompt": f"t{i} t{i + 1} t3", "domain": "ab"[i % 2]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def call(pair: Path, command: str, *more: str, drafter: Path | None = None, code: int = 0) -> str:
    models = ["--target", str(pair / "target"), "--drafter", str(drafter or pair / "drafter")]
    result = CliRunner().invoke(app, [command, *models, "--dtype", "float32", "--device", "cpu", *more])
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def test_a_drafter_that_guesses_is_reported_within_a_hundred_rounds_and_left_out(
    pair: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def engine(width: str) -> Engine:
        models = {"target": str(pair / "target"), "drafter": str(pair / "drafter")}
        return Engine(EngineConfig(**models, width=width, dtype="float32", device="cpu", max_batch_size=4))

    prompts, params = [[1, 2, 3], [4, 5], [6], [7, 8]], SamplingParams(max_tokens=100)
    drafting = engine("chain")
    outs = drafting.generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in engine("ar").generate(prompts, params)]
    assert sum(out.stats.draft_rounds for out in outs) <= 100
    assert sum(out.stats.rounds for out in outs) > 300
    health = drafting.stats()["drafter_health"]
    assert health["verdict"] == "rejected"
    assert not health["drafting"]
    said = [record for record in caplog.records if "no better than chance" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING


def test_calibrate_shows_and_keeps_what_it_measured(pair: Path, tmp_path: Path) -> None:
    options = ["--profile-dir", str(tmp_path / "profiles"), "--max-batch-size", "2", "--max-nodes", "15"]
    options += ["--prompts", str(pair / "prompts.jsonl")]
    first = call(pair, "calibrate", *options, "--png", str(tmp_path / "latency.png"))
    (profile,) = (tmp_path / "profiles").glob("*.json")
    measured = profile.read_text()
    assert str(profile) in first
    assert "◆" in first
    assert "packed tokens" in first
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    call(pair, "calibrate", *options)
    assert profile.read_text() == measured
    call(pair, "calibrate", *options, "--again")
    assert profile.read_text() != measured


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'cast_ray\[report\]'"):
        require_matplotlib()


def test_sweep_prints_the_papers_tables_and_writes_them(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAST_RAY_PROFILE_DIR", str(tmp_path / "profiles"))
    options = ["--prompts", str(pair / "prompts.jsonl"), "--count", "2", "--max-tokens", "12", "--widths", "0,3,7"]
    text = call(pair, "sweep", *options, "--output", str(tmp_path / "sweep"))
    assert "sweeping: 4/" in text  # a line a step, where there is no terminal for a bar
    for heading in ("Every width", "Predicted against best", "Shapes of equal size"):
        assert heading in text
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"widths.csv", "gaps.csv", "runs.csv", "sweep.png"}
    runs = (tmp_path / "sweep" / "runs.csv").read_text().splitlines()
    methods = {line.split(",")[2] for line in runs[1:]}
    assert {"ar", "chain", "fixed:3", "fixed:4", "fixed:7", "balanced", "joint"} <= methods
    # Every method decodes the same text: a run counts what its rounds committed.
    assert {line.split(",")[4] for line in runs[1:]} == {"12.0"}


def test_a_sweep_that_was_stopped_goes_on(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAST_RAY_PROFILE_DIR", str(tmp_path / "profiles"))
    options = ["--prompts", str(pair / "prompts.jsonl"), "--count", "1", "--max-tokens", "8", "--widths", "0,3,7"]
    options += ["--output", str(tmp_path / "sweep")]
    decoded: list[str] = []
    decode = sweep_module.decode

    def counting(engine: Engine, policy: Any, *rest: Any) -> Any:
        decoded.append(policy.name)
        if len(decoded) == 6:
            raise KeyboardInterrupt
        return decode(engine, policy, *rest)

    monkeypatch.setattr(sweep_module, "decode", counting)
    CliRunner().invoke(app, ["sweep", "--target", str(pair / "target"), "--drafter", str(pair / "drafter"), *options])
    log = tmp_path / "sweep" / "progress.jsonl"
    kept = log.read_text().splitlines()
    assert len(kept) > 2
    with pytest.raises(ConfigError, match="unfinished sweep with another max_tokens"):
        SweepLog(tmp_path / "sweep", {**json.loads(kept[0])["about"], "max_tokens": 9})
    # A line that was cut while it was written is measured again.
    log.write_text("\n".join([*kept[:-1], kept[-1][:9]]))
    decoded.clear()
    decoded += ["more"] * 10  # so that nothing interrupts
    text = CliRunner().invoke(
        app, ["sweep", "--target", str(pair / "target"), "--drafter", str(pair / "drafter"), *options]
    )
    assert text.exit_code == 0, text.output + str(text.exception)
    assert not log.exists()
    runs = [line.split(",") for line in (tmp_path / "sweep" / "runs.csv").read_text().splitlines()[1:]]
    # What was measured once is not measured again: one warm-up and the runs that were left.
    assert len(decoded) - 10 == 1 + len(runs) - (len(kept) - 2)
    first = json.loads(kept[1])
    (same,) = [run for run in runs if [int(run[0]), run[2]] == first["place"][1:]]
    assert float(same[3]) == first["run"]["ms"]


def test_a_sweep_of_some_minutes_says_how_to_go_on(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAST_RAY_PROFILE_DIR", str(tmp_path / "profiles"))
    run_sweep = sweep_module.run_sweep
    monkeypatch.setattr(sweep_module, "run_sweep", lambda *a, **more: run_sweep(*a, **{**more, "seconds": -1.0}))
    options = ["--prompts", str(pair / "prompts.jsonl"), "--count", "1", "--max-tokens", "8", "--widths", "0,3,7"]
    text = call(pair, "sweep", *options, "--minutes", "3", "--output", str(tmp_path / "sweep"))
    assert "the same command goes on" in text
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"progress.jsonl"}


@pytest.mark.parametrize("widths", ["", "0", "3,x", "-1,3"])
def test_widths_that_are_none_are_named(pair: Path, widths: str) -> None:
    result = CliRunner().invoke(app, ["sweep", "--widths", widths])
    assert isinstance(result.exception, ConfigError)
    assert "is no list of numbers of nodes" in str(result.exception)


def test_explain_draws_the_round(pair: Path) -> None:
    text = call(pair, "explain", "t1 t2 t3", "--width", "fixed:15", "--round", "2", "--max-tokens", "12")
    assert "Round 2" in text
    assert "(root)" in text
    assert "committed" in text
    assert "chain" in text


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_check_drafter_finds_shifted_positions_by_the_record(
    pair: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(pair / "drafter", tmp_path / "recorded")
    options = ["--prompts", str(pair / "prompts.jsonl"), "--count", "1", "--max-tokens", "8"]
    call(pair, "check-drafter", *options, "--record", drafter=copy)
    observe = DFlashDrafter.observe
    monkeypatch.setattr(DFlashDrafter, "observe", lambda self, f, slots, at: observe(self, f, slots, at + step))
    text = " ".join(call(pair, "check-drafter", *options, drafter=copy).split())
    assert ("off those that were recorded" in text) == (step != 0)


@pytest.mark.parametrize("more", ["", "{}+"])
def test_explain_tells_what_was_looked_up(pair: Path, more: str) -> None:
    drafter = Path(f"{more.format(pair / 'drafter')}lookup")
    options = ["--raw", "--width", "fixed:15", "--round", "3", "--max-tokens", "24"]
    text = call(pair, "explain", "t1 t2 t3 t4 t1 t2 t3 t4 t1 t2 t3", *options, drafter=drafter)
    assert "Round 3" in text
    assert "prompt" in text or "output" in text
    assert ("drafter" in text) == bool(more)


def test_check_drafter_writes_what_is_accepted_and_engines_start_from_it(pair: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pair / "drafter", tmp_path / "recorded")
    before = json.loads((copy / "config.json").read_text())
    options = ["--prompts", str(pair / "prompts.jsonl"), "--count", "2", "--max-tokens", "24", "--record"]
    text = call(pair, "check-drafter", *options, drafter=copy)
    assert "greedy" in text
    assert str(copy / "config.json") in text.replace("\n", "")
    after = json.loads((copy / "config.json").read_text())
    acceptance = after[RECORD].pop(ACCEPTANCE)
    assert len(after[RECORD].pop("signature")["masses"]) == 24
    assert after == before
    assert [part["temperature_up_to"] for part in acceptance["by_temperature"]] == [0.0, 1.0]
    assert acceptance["by_temperature"][0]["rounds"] > 20
    models = {"target": str(pair / "target"), "drafter": str(copy)}
    engine = Engine(EngineConfig(**models, width="chain", dtype="float32", device="cpu", max_batch_size=4))
    record = record_of(engine)
    assert record is not None
    assert record.rounds[0] == acceptance["by_temperature"][0]["rounds"]
    plain = Engine(EngineConfig(**{**models, "drafter": str(pair / "drafter")}, width="chain", device="cpu"))
    assert record_of(plain) is None


def test_a_damaged_record_is_named_and_ignored(pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = shutil.copytree(pair / "drafter", tmp_path / "damaged")
    raw = json.loads((copy / "config.json").read_text())
    raw[RECORD][ACCEPTANCE] = {"nodes": "many"}
    (copy / "config.json").write_text(json.dumps(raw))
    assert recorded_acceptance(copy) is None
    assert "reliability is ignored" in caplog.text
    assert "nodes" in caplog.text


def test_check_drafter_names_layers_that_differ_from_the_record(pair: Path, tmp_path: Path) -> None:
    shifted = shutil.copytree(pair / "drafter", tmp_path / "shifted")
    raw = json.loads((shifted / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [0, 1]
    (shifted / "config.json").write_text(json.dumps(raw))
    options = ["--prompts", str(pair / "prompts.jsonl"), "--count", "2", "--max-tokens", "8"]
    text = " ".join(call(pair, "check-drafter", *options, drafter=shifted).split())
    assert "the drafter was trained with [0, 2]" in text
    assert "layers +1" in text
    assert "positions -1" in text
    assert "depth promised accepted" in text


def _shuffled(folder: Path) -> None:
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    mixed = {
        name: tensor.flatten()[torch.randperm(tensor.numel())].view(tensor.shape) if tensor.ndim > 1 else tensor
        for name, tensor in weights.items()
    }
    save_file(mixed, folder / "model.safetensors")


def _other_mask(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"]["mask_token_id"] = 500
    (folder / "config.json").write_text(json.dumps(raw))


def _features_of_another_target(engine: Engine) -> None:
    """Such as another model's: of the same size, in directions of its own."""
    drafter: Any = drafter_of(engine)
    observe, hidden = drafter.observe, 576
    turn = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(0))).Q

    def turned(features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        rows = features.view(len(features), -1, hidden) @ turn.to(features.dtype)
        observe(rows.view(features.shape), slots, positions)

    drafter.observe = turned


def _positions_off_by_one(engine: Engine) -> None:
    """What is said of a position is taken for the one before it."""
    drafter: Any = drafter_of(engine)
    propose = drafter.propose

    def early(contexts: Any, top_k: int) -> DraftScores:
        scores = propose(contexts, top_k)
        return DraftScores(scores.logprobs.roll(-1, dims=1), scores.token_ids.roll(-1, dims=1))

    drafter.propose = early


OF_ENGINE = (_features_of_another_target, _positions_off_by_one)
EMBEDDED: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch_size": 8}
LONG = SamplingParams(max_tokens=32, ignore_eos=True)


def sample_prompts() -> list[Any]:
    rows = [json.loads(line) for line in SAMPLES.read_text(encoding="utf-8").splitlines()]
    return [row["messages"] for row in rows[::3]]


@pytest.fixture(scope="module")
def plain_text() -> list[list[int]]:
    engine = Engine(EngineConfig(**EMBEDDED, drafter="none", width="ar"))
    return [out.token_ids for out in engine.generate(sample_prompts(), LONG)]


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [_shuffled, _other_mask, *OF_ENGINE])
def test_a_sabotaged_drafter_is_reported_within_a_hundred_rounds_and_changes_no_output(
    sabotage: Callable[[Any], None], plain_text: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(find_drafter("embedded"), tmp_path / "drafter")
    raw = json.loads((folder / "config.json").read_text())
    raw.pop(RECORD)
    (folder / "config.json").write_text(json.dumps(raw))
    if sabotage not in OF_ENGINE:
        sabotage(folder)
    engine = Engine(EngineConfig(**EMBEDDED, drafter=str(folder), width="chain"))
    if sabotage in OF_ENGINE:
        sabotage(engine)
    outs = engine.generate(sample_prompts(), LONG)
    assert engine.stats()["drafter_health"]["verdict"] == "rejected"
    # A round of eight may end beyond the hundredth.
    assert sum(out.stats.draft_rounds for out in outs) <= 104
    assert "no better than chance" in caplog.text
    assert [out.token_ids for out in outs] == plain_text
