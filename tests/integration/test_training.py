"""The whole training job on tiny random targets: what it leaves behind, and that kills change none of it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import Gemma3TextConfig

from cast_ray.config import EngineConfig
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.pair import recorded_acceptance
from cast_ray.engine.engine import Engine
from cast_ray.errors import ConfigError, InputError
from cast_ray.request import SamplingParams
from cast_ray.training.config import TrainConfig
from cast_ray.training.driver import run_training
from tests.support import qwen3, save_tiny_model

SMALL: dict[str, Any] = {
    "answers": 128,
    "held_out": 8,
    "evaluated": 4,
    "answer_tokens": 12,
    "layers": 1,
    "block_size": 4,
    "draft_vocab": 32,
    "steps": 12,
    "sequences": 2,
    "anchors": 4,
    "soft_top": 4,
    "save_every_s": 1e-3,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), qwen3(vocab_size=40), spread=3.0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    words = [" ".join(f"t{(7 * i + 3 * j) % 40}" for j in range(3 + i % 4)) for i in range(160)]
    path.write_text("\n".join(json.dumps({"prompt": text, "domain": f"d{i % 2}"}) for i, text in enumerate(words)))
    return path


def _config(target: Path, prompts: Path, work: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "target": str(target), "prompts": prompts, "work": work, **changes})


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_the_export_drafts_here_and_loads_in_the_public_package(
    architecture: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    config = _config(target, prompts, tmp_path / "work", architecture=architecture)
    folder = run_training(config, Console(quiet=True))
    out = Engine(EngineConfig(target=str(target), drafter=str(folder), width="fixed:7", dtype="float32")).generate(
        ["t1 t2 t3"], SamplingParams(max_tokens=16)
    )
    plain = Engine(EngineConfig(target=str(target), drafter="none", width="ar", dtype="float32")).generate(
        ["t1 t2 t3"], SamplingParams(max_tokens=16)
    )
    assert out[0].token_ids == plain[0].token_ids
    assert out[0].stats.draft_rounds == out[0].stats.rounds

    kind = DFlashDraftModel if architecture == "dflash" else DFlash2DraftModel
    public, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert public.block_size == 4

    pair = json.loads((folder / "config.json").read_text())["cast_ray_pair"]
    assert pair["target"] == str(target)
    assert pair["target_layer_ids"] == [0, 1, 2]
    measured = recorded_acceptance(folder)
    assert measured is not None
    card = (folder / "README.md").read_text()
    assert "| all |" in card
    assert "| 3 |" in card  # reliability at the deepest depth
    assert (folder / "loss.png").exists()


def test_training_learns_what_the_target_says(target: Path, prompts: Path, tmp_path: Path) -> None:
    lengths = []
    for steps in (1, 150):
        config = _config(target, prompts, tmp_path / "work", steps=steps, sequences=8, anchors=8, answers=128)
        folder = run_training(config, Console(quiet=True))
        lengths.append(json.loads((folder / "evaluation.json").read_text())["round_length"]["all"]["fixed:7"])
    assert lengths[1] > lengths[0] + 0.1


def test_another_kind_of_target_needs_no_other_code(prompts: Path, tmp_path: Path) -> None:
    gemma = Gemma3TextConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    target = save_tiny_model(tmp_path / "target", gemma)
    folder = run_training(_config(target, prompts, tmp_path / "work", steps=3, taps=(1,)), Console(quiet=True))
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["round_length"]["all"]["chain"] >= 1.0


@pytest.mark.parametrize("stage", ["answers", "features", "training"])
def test_a_job_killed_in_any_stage_ends_with_the_same_artefacts(
    stage: str, target: Path, prompts: Path, tmp_path: Path, unbroken: Path
) -> None:
    marker = {
        "answers": "held_out/00000.parquet",
        "features": "features/00001.safetensors",
        "training": "training/last.pt",
    }[stage]
    work = tmp_path / "work"
    job = subprocess.Popen(_command(target, prompts, work), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (work / marker).exists():
            assert job.poll() is None, job.stdout.read().decode() if job.stdout else ""
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.communicate()
    assert not (work / "drafter" / "README.md").exists(), "it was killed too late to show anything"
    subprocess.run(_command(target, prompts, work), check=True, capture_output=True)
    _assert_same(work, unbroken)


@pytest.fixture(scope="module")
def unbroken(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a job that nobody killed."""
    work = tmp_path_factory.mktemp("unbroken")
    subprocess.run(_command(target, prompts, work), check=True, capture_output=True)
    return work


def _command(target: Path, prompts: Path, work: Path) -> list[str]:
    settings = {**SMALL, "target": target, "prompts": prompts, "work": work, "evaluated": 0, "steps": 40}
    settings.pop("soft_top")
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "cast_ray.cli", "train-drafter", *flags]


def _assert_same(work: Path, other: Path) -> None:
    for folder in ("held_out", "answers"):
        names = sorted(path.name for path in (other / folder).iterdir())
        assert sorted(path.name for path in (work / folder).iterdir()) == names
        for name in names:
            assert pq.read_table(work / folder / name) == pq.read_table(other / folder / name)
    for path in [*sorted((other / "features").glob("*.safetensors")), other / "drafter" / "model.safetensors"]:
        ours, theirs = load_file(work / path.relative_to(other)), load_file(path)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], atol=0.0, rtol=0.0, msg=f"{path.name}: {name}")


def test_a_job_killed_while_actors_on_ray_answer_ends_with_the_same_answers(
    target: Path, prompts: Path, tmp_path: Path, unbroken: Path
) -> None:
    work = tmp_path / "work"
    job = subprocess.Popen([*_command(target, prompts, work), "--replicas", "2"], start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while not list(work.glob("*/*.parquet")):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # its own cluster goes with it
        job.wait()
    assert not (work / "features").exists(), "it was killed too late to show anything"
    subprocess.run(_command(target, prompts, work), check=True, capture_output=True)
    _assert_same(work, unbroken)


def test_a_longer_run_goes_on_from_before_the_rate_fell(target: Path, prompts: Path, tmp_path: Path) -> None:
    run_training(_config(target, prompts, tmp_path / "grown", steps=12, evaluated=0), Console(quiet=True))
    grown = run_training(_config(target, prompts, tmp_path / "grown", steps=20, evaluated=0), Console(quiet=True))
    once = run_training(_config(target, prompts, tmp_path / "once", steps=20, evaluated=0), Console(quiet=True))
    ours, theirs = load_file(grown / "model.safetensors"), load_file(once / "model.safetensors")
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=0.0, rtol=0.0)


def test_a_drafter_is_what_a_run_may_start_from(target: Path, prompts: Path, tmp_path: Path) -> None:
    first = run_training(_config(target, prompts, tmp_path / "first", evaluated=0), Console(quiet=True))
    known = load_file(first / "model.safetensors")
    for architecture, new in (("dflash", 0), ("dflash2", 7)):
        # A learning rate of next to nothing: what is exported is what it started from.
        still = {"start_from": str(first), "steps": 1, "learning_rate": 1e-9, "weight_decay": 0.0, "evaluated": 0}
        config = _config(target, prompts, tmp_path / architecture, architecture=architecture, **still)
        ours = load_file(run_training(config, Console(quiet=True)) / "model.safetensors")
        for name in known:
            torch.testing.assert_close(ours[name].float(), known[name].float(), atol=1e-6, rtol=2**-7)
        assert len(ours) - len(known) == new
    with pytest.raises(ConfigError, match="num_hidden_layers 1, asked for 2"):
        run_training(_config(target, prompts, tmp_path / "b", layers=2, start_from=str(first)), Console(quiet=True))
    assert not (tmp_path / "b").exists()


def test_a_pack_trains_where_it_was_carried_to(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "train_on_gpu.py"
    spec = importlib.util.spec_from_file_location("train_on_gpu", script)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "SHARD_BYTES", 4000)
    first = run_training(_config(target, prompts, tmp_path / "first", evaluated=0), Console(quiet=True))
    files = tool.pack(str(target), prompts, tmp_path / "first", str(first), tmp_path / "pack")
    assert max(path.stat().st_size for path in files) <= 4000
    small = {name: value for name, value in SMALL.items() if name not in ("steps", "device", "answers", "soft_top")}
    flags = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["train_on_gpu.py"])
    out = tmp_path / "drafter"
    # The answers that were carried along are taken: only the second 64 are new.
    flags += ["--answers", "192"]
    tool.train(tmp_path / "pack", 0.02, out, "cpu", tmp_path / "scratch", flags)
    assert read_config(out).taps == read_config(first).taps
    there, here = tmp_path / "first" / "answers", tmp_path / "scratch" / "work" / "answers"
    assert len(list(here.iterdir())) == 3
    for path in there.iterdir():
        assert (here / path.name).read_bytes() == path.read_bytes()


def test_what_cannot_work_is_said_before_any_work(target: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer of the target's 3"):
        run_training(_config(target, prompts, tmp_path / "a", taps=(0, 9)), Console(quiet=True))
    with pytest.raises(InputError, match="cannot be read"):
        run_training(_config(target, tmp_path / "missing.jsonl", tmp_path / "a"), Console(quiet=True))
    with pytest.raises(ConfigError, match="Give one of them"):
        _config(target, prompts, tmp_path / "a", minutes=3.0)
    assert not (tmp_path / "a" / "answers").exists()
    run_training(_config(target, prompts, tmp_path / "b", steps=1, evaluated=0), Console(quiet=True))
    with pytest.raises(ConfigError, match="holds features made with"):
        run_training(_config(target, prompts, tmp_path / "b", taps=(0,), evaluated=0), Console(quiet=True))
    with pytest.raises(ConfigError, match="layers 1 there, 2 asked for"):
        run_training(_config(target, prompts, tmp_path / "b", layers=2, evaluated=0), Console(quiet=True))


def test_engine_actors_write_the_same_answers(target: Path, prompts: Path, tmp_path: Path, ray_cluster: None) -> None:
    folders = []
    for replicas in (None, 2):
        work = tmp_path / str(replicas)
        run_training(_config(target, prompts, work, steps=1, evaluated=0, replicas=replicas), Console(quiet=True))
        folders.append(work)
    for path in (folders[0] / "answers").iterdir():
        assert pq.read_table(path) == pq.read_table(folders[1] / "answers" / path.name)


@pytest.mark.slow
def test_fifty_steps_for_the_embedded_target_are_a_drafter_that_helps(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    subjects = ["rivers", "prime numbers", "sorting a list", "old trains", "a short poem", "cooking rice"]
    lines = [{"prompt": f"Tell me {n} things about {text}.", "domain": "chat"} for n in (2, 3, 4) for text in subjects]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    command = [sys.executable, "-m", "cast_ray.cli", "train-drafter", "--target", "embedded", "--steps", "50"]
    subprocess.run([*command, "--prompts", str(prompts), "--work", str(tmp_path / "work")], check=True)
    folder = tmp_path / "work" / "drafter"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["round_length"]["all"]["fixed:31"] > 1.1
    public, info = DFlashDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert public.block_size == 8
    engine = Engine(EngineConfig(drafter=str(folder), width="fixed:31", dtype="float32"))
    (answer,) = engine.generate(["Tell me about rivers."], SamplingParams(max_tokens=32))
    assert answer.stats.rounds < len(answer.token_ids)
