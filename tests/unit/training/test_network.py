"""The network as it trains against the network as it drafts, on the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import build_network, load_dflash
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from cast_ray.training.network import block_hidden, new_network
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PAGE = 4
SHAPES: dict[str, dict[str, Any]] = {
    "both_ways": {},
    "causal": {"is_causal": True},
    "sliding": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "sliding_both_ways": {
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "is_causal": False,
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            "block_size": 5,
            "mask_token_id": 1,
            "target_layer_ids": [0, 2],
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 4,
            "selector_top_k": 6,
        },
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_training_sees_what_drafting_sees(shape: str, tmp_path: Path) -> None:
    target_config = qwen3(vocab_size=64)
    folder = save_tiny_drafter(tmp_path / "drafter", target=target_config, **SHAPES[shape])
    loaded = load_target(
        str(save_tiny_model(tmp_path / "target", target_config)),
        torch.float32,
        torch.device("cpu"),
        attn_implementation=ATTENTION_NAME,
    )
    config = read_config(folder)
    target = Target(loaded, SdpaBackend(PAGE), slots=20 * PAGE, taps=config.taps)
    drafter = load_dflash(folder, config, target, 20 * PAGE, PAGE)
    features = torch.randn(2, 9, len(config.taps) * 32)
    roots = torch.tensor([[3, 9, 1], [0, 7, 5]])
    tokens = torch.full((2, 3, config.block_size), config.mask_token_id)
    tokens[:, :, 0] = torch.randint(64, (2, 3))

    blocks = F.embedding(tokens, target.embedding) * config.input_scale
    trained = block_hidden(drafter.network, features, roots, blocks)

    table = torch.randperm(20)[None, :5]
    for s in range(2):
        for a in range(3):
            length = int(roots[s, a])
            positions = torch.arange(length)
            drafter.observe(features[s, :length], table[0, positions // PAGE] * PAGE + positions % PAGE, positions)
            contexts = DraftContexts(tokens[s, a, :1], [length], roots[s, a][None], table, None)
            drafted = drafter.block_hidden(contexts)[0]
            torch.testing.assert_close(trained[s, a], drafted, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_causal_blocks_may_be_cut_short(tmp_path: Path) -> None:
    target_config = qwen3(vocab_size=64)
    shape = {**SHAPES["dflash2"], "is_causal": True}
    folder = save_tiny_drafter(tmp_path / "drafter", target=target_config, **shape)
    config = read_config(folder)
    network = build_network(config, load_file(folder / "model.safetensors"), folder)
    features, roots, blocks = torch.randn(1, 9, 64), torch.tensor([[3, 9, 1]]), torch.randn(1, 3, 5, 32)
    whole = block_hidden(network, features, roots, blocks)
    torch.testing.assert_close(block_hidden(network, features, roots, blocks[:, :, :3]), whole[:, :, :3])


def test_a_new_selector_starts_silent_and_knows_like_tokens(tmp_path: Path) -> None:
    target_config = qwen3(vocab_size=64)
    config = read_config(save_tiny_drafter(tmp_path / "drafter", target=target_config, **SHAPES["dflash2"]))
    embedding = torch.randn(64, 32)
    embedding[7] = embedding[9] + 0.01
    selector = new_network(config, embedding, 0).candidate_selector
    assert selector is not None
    assert not selector.pair_scores(torch.randn(3, 32), torch.arange(3)[:, None], torch.arange(9).view(3, 3)).any()
    codebook = selector.predecessor_codebook.weight
    assert (codebook[7] - codebook[9]).norm() < 0.2 < (codebook[7] - codebook[8]).norm()
