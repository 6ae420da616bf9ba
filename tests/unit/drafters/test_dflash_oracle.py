"""Our DFlash against the released package's, on random weights, over several rounds with both caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import Qwen3Config

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import load_dflash
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PAGE = 4

SHAPES: dict[str, dict[str, Any]] = {
    "two_layers_block_5_grouped_heads": {},
    "one_layer_block_8_every_head_its_own": {
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "dflash_config": {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [0, 1, 2]},
    },
    "four_layers_block_16_one_kv_head_scaled_and_capped": {
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 0,
            "target_layer_ids": [1],
            "input_embedding_scale": 1.7,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
        },
    },
    "sliding_layers_causal_unless_told": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "sliding_layers_told_to_look_both_ways": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "is_causal": False,
        "dflash_config": {"block_size": 6, "mask_token_id": 1, "target_layer_ids": [0, 1]},
    },
    "all_layers_causal": {"is_causal": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_hidden_states_and_logits_equal_the_public_implementation(shape: str, tmp_path: Path) -> None:
    target_config = qwen3(vocab_size=64)
    folder = save_tiny_drafter(tmp_path / "drafter", target=target_config, **SHAPES[shape])
    loaded = load_target(
        str(save_tiny_model(tmp_path / "target", target_config)),
        torch.float32,
        torch.device("cpu"),
        attn_implementation=ATTENTION_NAME,
    )
    config = read_config(folder)
    target = Target(loaded, SdpaBackend(PAGE), slots=40 * PAGE, taps=config.taps)
    ours = load_dflash(folder, config, target, 40 * PAGE, PAGE)
    theirs = _public_model(folder)

    # Pages in no order, and a second request in the same forward, must make no difference.
    tables = torch.randperm(40)[:24].view(2, 12)
    generator = torch.Generator().manual_seed(5)
    lengths = [7, 2]
    caches = [_make_cache(theirs.config) for _ in lengths]
    fresh = [torch.randn(n, len(config.taps) * 32, generator=generator) for n in lengths]
    seen = [0, 0]
    for accepted in ([3, 1], [1, 5], [4, 2], [1, 1]):
        expected = []
        roots = torch.randint(64, (2,), generator=generator)
        for b in range(2):
            positions = torch.arange(seen[b], lengths[b])
            slots = tables[b, positions // PAGE] * PAGE + positions % PAGE
            ours.observe(fresh[b], slots, positions)
            block = torch.full((1, config.block_size), config.mask_token_id)
            block[0, 0] = roots[b]
            hidden = theirs(
                target_hidden=fresh[b][None],
                noise_embedding=F.embedding(block, target.embedding) * config.input_scale,
                position_ids=torch.arange(seen[b], lengths[b] + config.block_size)[None],
                past_key_values=caches[b],
                use_cache=True,
            )
            _crop_to(caches[b], lengths[b])
            expected.append(theirs.compute_logits(hidden[:, 1:], target.head)[0])
        contexts = DraftContexts(roots, list(lengths), torch.tensor(lengths), tables, None)
        torch.testing.assert_close(ours.block_logits(contexts), torch.stack(expected), atol=2e-5, rtol=1e-4)
        seen = list(lengths)
        lengths = [n + more for n, more in zip(lengths, accepted, strict=True)]
        fresh = [torch.randn(more, len(config.taps) * 32, generator=generator) for more in accepted]


def _public_model(folder: Path) -> DFlashDraftModel:
    config = Qwen3Config.from_json_file(folder / "config.json")
    config._attn_implementation = "sdpa"
    model = DFlashDraftModel(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
