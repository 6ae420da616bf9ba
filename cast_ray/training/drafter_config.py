"""The config of a new drafter: z-lab's public format, its shape taken from the target's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from cast_ray.drafters.checkpoint import DFLASH2_ARCHITECTURE, DFlashConfig, read_config
from cast_ray.errors import ConfigError, describe
from cast_ray.models.loading import LoadedTarget
from cast_ray.training.config import TrainConfig
from cast_ray.training.features import choose_taps
from cast_ray.training.files import read_json, write_json
from cast_ray.training.start import mask_token_of

# DFlash 2: rows that a convolution sees, channels that share a dynamic kernel, width of the codebooks, candidates.
CONV_KERNEL, CONV_GROUP, SELECTOR_RANK, SELECTOR_TOP_K = 3, 64, 32, 16


def write_config(config: TrainConfig, loaded: LoadedTarget, seen: set[int], folder: Path) -> DFlashConfig:
    """Write `folder/config.json` and read it back as everyone else will. seen: tokens that occur in the data.

    A mask token once chosen stays, whatever later data holds.
    """
    raw, known = drafter_config(config, loaded, seen), read_json(folder / "config.json")
    if known is not None:
        raw["dflash_config"]["mask_token_id"] = known["dflash_config"]["mask_token_id"]
    elif config.start_from is not None:
        raw["dflash_config"]["mask_token_id"] = mask_token_of(config.start_from)
    write_json(folder / "config.json", raw)
    return read_config(folder)


def drafter_config(config: TrainConfig, loaded: LoadedTarget, seen: set[int]) -> dict[str, Any]:
    """config.json as plain values."""
    text = loaded.model.config.get_text_config()
    two = config.architecture == "dflash2"
    heads = int(text.num_attention_heads)
    layers = int(text.num_hidden_layers)
    taps = choose_taps(layers, config.taps)
    if bad := [tap for tap in taps if not 0 <= tap < layers]:
        raise ConfigError(describe("taps", bad[0], f"is no layer of the target's {layers}", "Count from 0"))
    return {
        "architectures": [DFLASH2_ARCHITECTURE if two else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": int(text.hidden_size),
        "intermediate_size": config.intermediate or int(getattr(text, "intermediate_size", 0) or 3 * text.hidden_size),
        "num_hidden_layers": config.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", 1e-6)),
        "max_position_embeddings": int(loaded.max_context),
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
        "layer_types": ["full_attention"] * config.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.layers,
        "tie_word_embeddings": False,
        "vocab_size": int(text.vocab_size),
        "num_target_layers": layers,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "block_size": config.block_size,
        **({"is_causal": True} if config.causal else {}),
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": _mask_token(loaded, seen),
            "target_layer_ids": list(taps),
            **(_dflash2(config, text.hidden_size) if two else {}),
        },
    }


def _dflash2(config: TrainConfig, hidden_size: int) -> dict[str, int]:
    """What DFlash 2 adds. The selector's candidates are no more than the draft vocabulary has."""
    return {
        "conv_kernel_size": CONV_KERNEL,
        "conv_group_size": math.gcd(CONV_GROUP, hidden_size),
        "selector_rank": SELECTOR_RANK,
        "selector_top_k": min(SELECTOR_TOP_K, config.draft_vocab),
    }


def _rope_theta(text: Any) -> float:
    """The target's own base; of several (by layer type) the largest, that of its global attention."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    found = [float(p["rope_theta"]) for p in (nested or [parameters]) if "rope_theta" in p]
    return max(found, default=10_000.0)


def _mask_token(loaded: LoadedTarget, seen: set[int]) -> int:
    """A token that text never holds: the last special one that the data does not use, else the last unused token."""
    vocab = int(loaded.model.config.get_text_config().vocab_size)
    added = getattr(loaded.tokenizer, "added_tokens_decoder", {})
    special = [token for token, about in added.items() if about.special]
    for candidates in (sorted(special, reverse=True), range(vocab - 1, -1, -1)):
        for token in candidates:
            if token < vocab and token not in seen and token not in loaded.eos_token_ids:
                return int(token)
    return vocab - 1


def lent(loaded: LoadedTarget) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and output head, `[vocab, hidden]` each, frozen."""
    head = loaded.model.get_output_embeddings().weight
    return loaded.model.get_input_embeddings().weight.detach(), head.detach()
