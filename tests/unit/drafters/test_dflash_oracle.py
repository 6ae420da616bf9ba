"""Our DFlash against the released package's, on random weights, over several rounds with both caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import dflash2_block
from tests.unit.drafters.oracle import oracle_rounds

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
    "dflash2": {"dflash_config": dflash2_block()},
    "dflash2_sliding_kernel_as_long_as_the_block": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "dflash_config": dflash2_block(block_size=4, conv_kernel_size=4, conv_group_size=32),
    },
    "dflash2_a_kernel_for_each_channel_scaled_and_capped": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "dflash_config": dflash2_block(
            block_size=9,
            conv_kernel_size=2,
            conv_group_size=1,
            input_embedding_scale=1.7,
            output_multiplier=0.5,
            final_logit_softcapping=2.0,
        ),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_hidden_states_and_logits_equal_the_public_implementation(shape: str, tmp_path: Path) -> None:
    for turn in oracle_rounds(tmp_path, SHAPES[shape]):
        # The first call takes in what was observed; the second finds it in the cache.
        torch.testing.assert_close(turn.ours.block_logits(turn.contexts), turn.logits, atol=2e-5, rtol=1e-4)
        hidden = turn.ours.block_hidden(turn.contexts)[:, 1:]
        torch.testing.assert_close(hidden, turn.hidden, atol=2e-5, rtol=1e-4)
