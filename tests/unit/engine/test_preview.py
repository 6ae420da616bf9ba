"""What would decode is told without reading weights, and what cannot is refused as the engine itself refuses it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from cast_ray.config import EngineConfig
from cast_ray.drafters.pair import RECORD, pair_record
from cast_ray.engine.preview import preview
from cast_ray.engine.setup import build
from cast_ray.errors import CastRayError
from cast_ray.models import loading
from cast_ray.models.loading import load_target
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), qwen3())


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    folder = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    raw = json.loads((folder / "config.json").read_text())
    record = pair_record(raw, load_target(str(target), torch.float32, torch.device("cpu")))
    (folder / "config.json").write_text(json.dumps({**raw, RECORD: record}))
    return folder


def test_a_pair_that_belongs_together_is_named_in_silence_and_no_weight_is_read(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights"))
    found = preview(EngineConfig(target=str(target), drafter=f"{drafter}+lookup", width="joint"))
    assert found.target.startswith(f"{target} (qwen3, ")
    assert found.drafter.startswith(f"{drafter} (DFlash, ")
    assert found.drafter.endswith(" and lookup")
    assert found.width == "joint"
    assert caplog.text == ""


def test_a_width_without_a_drafter_is_told_as_what_it_becomes(target: Path) -> None:
    assert preview(EngineConfig(target=str(target), drafter="none")).width == "ar, and not joint"


def test_another_targets_drafter_and_another_template_are_told(
    target: Path, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = json.loads((drafter / "config.json").read_text())
    raw[RECORD]["chat_template_sha256"] = "0" * 64
    raw[RECORD]["shape"]["intermediate_size"] += 1
    (drafter / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.WARNING):
        preview(EngineConfig(target=str(target), drafter=str(drafter)))
    assert "it was trained for another model" in caplog.text
    assert "another chat template" in caplog.text


@pytest.mark.parametrize("wrong", ["target", "weights", "drafter", "layers", "width"])
def test_what_the_engine_would_refuse_is_refused_in_the_same_words(
    target: Path, drafter: Path, tmp_path: Path, wrong: str
) -> None:
    said = {"target": str(target), "drafter": str(drafter), "width": "fixed:4", "dtype": "float32"}
    if wrong == "target":
        said["target"] = str(tmp_path / "absent")
    elif wrong == "weights":
        empty = tmp_path / "empty"
        empty.mkdir()
        (empty / "config.json").write_text((target / "config.json").read_text())
        said["target"] = str(empty)
    elif wrong == "drafter":
        said["drafter"] = str(tmp_path / "absent")
    elif wrong == "layers":
        raw = json.loads((drafter / "config.json").read_text())
        raw["dflash_config"]["target_layer_ids"] = [0, 1]
        (drafter / "config.json").write_text(json.dumps(raw))
    else:
        said["drafter"] = "none"
    with pytest.raises(CastRayError) as before:
        preview(EngineConfig(**said))
    with pytest.raises(CastRayError) as loading_it:
        build(EngineConfig(**said))
    assert (type(before.value), str(before.value)) == (type(loading_it.value), str(loading_it.value))
