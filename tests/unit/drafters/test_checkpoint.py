"""A drafter that cannot be read or does not fit its target is refused by name, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.drafters.checkpoint import DFlash2Config, find_drafter, read_config
from cast_ray.drafters.dflash import DFlashDrafter
from cast_ray.errors import DrafterError
from tests.support import dflash2_block, qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), qwen3())


def start(target: Path, drafter: Path | str) -> None:
    Engine(EngineConfig(target=str(target), drafter=str(drafter), width="chain", dtype="float32", device="cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "its hidden_size is 48, the target's is 32"),
        ({"vocab_size": 99}, "its vocabulary has 99 tokens, the target's has 12"),
        ({"num_target_layers": 30}, "made for a target of 30 layers, this one has 3"),
        (
            {"dflash_config": {"block_size": 5, "mask_token_id": 1, "target_layer_ids": [0, 3]}},
            "it reads target layer 3, the target has layers 0 to 2",
        ),
        (
            {"dflash_config": {"block_size": 5, "mask_token_id": 12, "target_layer_ids": [0]}},
            "its mask_token_id 12 is outside the target's 12 tokens",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save_tiny_drafter(tmp_path, target=qwen3(), **changes)
    with pytest.raises(DrafterError) as caught:
        start(target, folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "drafter='none'" in str(caught.value)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"block_size": 5, "target_layer_ids": [0]}, "mask_token_id=None: is missing"),
        ({"block_size": 1, "mask_token_id": 1, "target_layer_ids": [0]}, "block_size=1: must be at least 2"),
        ({"block_size": 5, "mask_token_id": 1, "target_layer_ids": []}, "target_layer_ids=[]: must be a list"),
    ],
)
def test_a_config_that_lacks_something_is_refused(tmp_path: Path, block: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 32, "num_hidden_layers": 1, "dflash_config": block})
    )
    with pytest.raises(DrafterError) as caught:
        read_config(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": None}, "conv_kernel_size=None: is missing, and this is a DFlash 2 drafter"),
        ({"conv_group_size": None}, "conv_group_size=None: is missing"),
        ({"selector_rank": None}, "selector_rank=None: is missing"),
        ({"selector_top_k": None}, "selector_top_k=None: is missing"),
        ({"conv_kernel_size": 0}, "conv_kernel_size=0: must be a whole number of at least 1"),
        ({"selector_rank": "big"}, "selector_rank='big': must be a whole number of at least 1"),
        ({"conv_group_size": 5}, "conv_group_size=5: does not divide the hidden_size of 32"),
        ({"selector_top_k": 13}, "selector_top_k=13: is more than the 12 tokens of the vocabulary"),
    ],
)
def test_a_dflash2_config_that_is_not_whole_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save_tiny_drafter(tmp_path, target=qwen3(), dflash_config=dflash2_block())
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError) as caught:
        start(target, folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_config_that_names_dflash2_must_have_its_values(tmp_path: Path) -> None:
    save_tiny_drafter(tmp_path, target=qwen3())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["DFlash2DraftModel"]}))
    with pytest.raises(DrafterError, match="conv_kernel_size=None: is missing"):
        read_config(tmp_path)


def test_dflash2_values_are_read_from_either_level_of_the_config(tmp_path: Path) -> None:
    save_tiny_drafter(tmp_path, target=qwen3())
    assert read_config(tmp_path).dflash2 is None
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= {"conv_group_size": 8, "selector_top_k": 4}
    config |= {"conv_kernel_size": 3, "selector_rank": 2, "selector_top_k": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).dflash2 == DFlash2Config(3, 8, 2, 4)


def test_layers_that_a_config_does_not_name_follow_the_formats_rule(tmp_path: Path) -> None:
    from dflash.model import build_target_layer_ids

    for draft_layers, target_layers in ((1, 30), (3, 30), (5, 36)):
        raw = {
            "num_hidden_layers": draft_layers,
            "num_target_layers": target_layers,
            "dflash_config": {"mask_token_id": 0},
        }
        (tmp_path / "config.json").write_text(json.dumps(raw))
        config = read_config(tmp_path)
        assert list(config.taps) == build_target_layer_ids(target_layers, draft_layers)
        assert config.block_size == 16


def test_weights_that_do_not_fit_the_config_are_named(target: Path, tmp_path: Path) -> None:
    folder = save_tiny_drafter(tmp_path, target=qwen3())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DrafterError, match=r"tensors that do not fit its config.json \(layers\.2\."):
        start(target, folder)


def test_damaged_and_missing_files_are_named(target: Path, tmp_path: Path) -> None:
    folder = save_tiny_drafter(tmp_path / "d", target=qwen3())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DrafterError, match="cannot be read"):
        start(target, folder)
    weights.unlink()
    with pytest.raises(DrafterError, match="cannot be read"):
        start(target, folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="z-lab's DFlash format"):
        start(target, folder)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "plain"])
def test_a_folder_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(DrafterError, match="is no folder"):
        find_drafter(name)


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DrafterError, match=r"nobody/nothing.*cannot be fetched"):
        find_drafter("nobody/nothing")


def test_the_shipped_drafter_is_in_the_public_format() -> None:
    from dflash.model import DFlashDraftModel

    folder = find_drafter("embedded")
    ours = read_config(folder)
    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    assert (ours.block_size, ours.mask_token_id, list(ours.taps)) == (
        theirs.block_size,
        theirs.mask_token_id,
        list(theirs.target_layer_ids),
    )


def test_a_shortlist_restricts_what_is_drafted_and_changes_no_output(target: Path, tmp_path: Path) -> None:
    folder = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    settings = {"target": str(target), "drafter": str(folder), "width": "fixed:20", "dtype": "float32", "device": "cpu"}
    whole = Engine(EngineConfig(**settings)).generate([[1, 2, 3]], SamplingParams(max_tokens=40))[0]
    ids = torch.tensor([7, 2, 11, 5])
    save_file({"token_ids": ids}, folder / "draft_vocab.safetensors")
    engine = Engine(EngineConfig(**settings))
    drafter = engine._parts.drafter
    assert isinstance(drafter, DFlashDrafter)
    proposed = []
    propose = drafter.propose

    def watch(*arguments: Any) -> Any:
        scores = propose(*arguments)
        proposed.append(scores.token_ids.unique())
        return scores

    drafter.propose = watch  # type: ignore[method-assign]
    out = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=40))[0]
    assert out.token_ids == whole.token_ids
    assert torch.equal(torch.cat(proposed).unique(), ids.sort().values)
    assert drafter.shape()["shortlist"] == 4


@pytest.mark.parametrize("ids", [[1, 1], [12], [-1], []])
def test_a_shortlist_that_does_not_fit_is_named(target: Path, tmp_path: Path, ids: list[int]) -> None:
    folder = save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    save_file({"token_ids": torch.tensor(ids, dtype=torch.int64)}, folder / "draft_vocab.safetensors")
    with pytest.raises(DrafterError, match=r"draft_vocab.safetensors.*distinct int64 token ids below 12"):
        start(target, folder)
