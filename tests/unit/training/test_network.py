"""The network as it trains against the network as it drafts, on the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import load_dflash
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from cast_ray.training.network import block_hidden
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
