"""A drafter's folder says what it was made for: another target is named at load, other layers are refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.drafters.checkpoint import find_drafter, read_config
from cast_ray.drafters.pair import RECORD, check_record, pair_record, weights_hash
from cast_ray.errors import DrafterError
from cast_ray.models.loading import LoadedTarget, load_target
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), qwen3())


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    """A drafter with a true record of its pair."""
    folder = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, RECORD: pair_record(raw, load(target))}))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedTarget:
    return load_target(str(folder), dtype, torch.device("cpu"))


def change(folder: Path, **values: Any) -> None:
    """Set values of the dflash_config."""
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"].update(values)
    (folder / "config.json").write_text(json.dumps(raw))


def start(target: Path, drafter: Path) -> Engine:
    return Engine(EngineConfig(target=str(target), drafter=str(drafter), width="chain", dtype="float32", device="cpu"))


def test_the_right_pair_is_loaded_in_silence(target: Path, drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert check_record(drafter, read_config(drafter), load(target, dtype)) == []
    assert caplog.text == ""


def test_layers_shifted_by_one_are_refused_at_load(target: Path, drafter: Path) -> None:
    change(drafter, target_layer_ids=[0, 1])
    with pytest.raises(DrafterError, match=r"target_layer_ids=\[0, 1\]: the drafter was trained with \[0, 2\]"):
        start(target, drafter)


def test_another_mask_token_is_refused_at_load(target: Path, drafter: Path) -> None:
    change(drafter, mask_token_id=3)
    with pytest.raises(DrafterError, match="mask_token_id=3: the drafter was trained with 1"):
        start(target, drafter)


def test_another_fine_tune_is_named_and_decodes_as_it_would_alone(
    drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_tiny_model(tmp_path / "other", qwen3(), seed=9)
    with caplog.at_level(logging.WARNING):
        engine = start(other, drafter)
    assert "another fine-tune or another quantisation" in caplog.text
    assert "check-drafter" in caplog.text
    plain = Engine(EngineConfig(target=str(other), drafter="none", width="ar", dtype="float32", device="cpu"))
    params = SamplingParams(max_tokens=24)
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == plain.generate([[1, 2, 3]], params)[0].token_ids


def test_a_model_of_another_shape_is_named_with_both_sides(
    drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_tiny_model(tmp_path / "other", qwen3(intermediate_size=96))
    start(other, drafter)
    assert "intermediate_size 64 (here 96)" in caplog.text


def test_another_chat_template_is_named(
    target: Path, drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    start(other, drafter)
    assert "another chat template" in caplog.text
    assert "weights" not in caplog.text


def test_one_changed_matrix_changes_the_hash(target: Path) -> None:
    loaded = load(target)
    before = weights_hash(loaded)
    assert weights_hash(load(target)) == before
    weight = loaded.model.get_submodule("model.layers.1.mlp.up_proj").weight
    weight.add_(0.05 * torch.randn_like(weight))
    assert weights_hash(loaded) != before


@pytest.mark.parametrize("record", [7, {}, {"shape": 3, "weights_sha256": 1}])
def test_a_damaged_record_never_stops_an_engine(target: Path, drafter: Path, record: Any) -> None:
    raw = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**raw, RECORD: record}))
    start(target, drafter)


def test_the_shipped_drafter_records_what_its_config_says() -> None:
    folder = find_drafter("embedded")
    record = json.loads((folder / "config.json").read_text())[RECORD]
    config = read_config(folder)
    assert record["target"] == "embedded"
    assert record["target_layer_ids"] == list(config.taps)
    assert record["mask_token_id"] == config.mask_token_id
    assert len(record["weights_sha256"]) == 64
