"""A target with packed and fused parts gives the logits and features of the plain one, whatever its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3MoeConfig

from cast_ray.models import linear, native
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.flatten import PromptChunk, make_step
from cast_ray.models.fused import FusedAttention, FusedLayer, FusedMLP, FusedNorm, speed_up
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from tests.support import TINY, qwen3, save_tiny_model

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CONFIGS: dict[str, tuple[Any, bool]] = {
    "llama": (LlamaConfig(**TINY, attention_bias=True, mlp_bias=True), True),
    "mistral": (MistralConfig(**TINY, sliding_window=4), True),
    "qwen2": (Qwen2Config(**TINY, use_sliding_window=True, max_window_layers=0, **SLIDING), True),
    "qwen3": (qwen3(), True),
    "qwen3 tied, sliding": (qwen3(tie_word_embeddings=True, use_sliding_window=True, **SLIDING), True),
    "gemma3": (Gemma3TextConfig(**TINY, query_pre_attn_scalar=8, **SLIDING), False),
    "qwen3-moe": (Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), False),
}


def run(folder: Path, dtype: torch.dtype, fast: bool, widen: bool = False) -> tuple[Target, Tensor, Tensor]:
    """Logits and features of two prompts in one forward; widen: compute in float32 with the dtype's weights."""
    loaded = load_target(str(folder), dtype, torch.device("cpu"), attn_implementation=ATTENTION_NAME)
    if widen:
        loaded.model.float()
    if fast:
        assert speed_up(loaded.model) > 0
    target = Target(loaded, SdpaBackend(4), slots=64, taps=(0, 2))
    prompts = [[1, 5, 3, 2, 7, 7, 11, 4, 9], [8, 2, 6]]
    chunks = [PromptChunk(ids, 0, torch.arange(4) + 4 * i) for i, ids in enumerate(prompts)]
    with torch.inference_mode():
        out = target.forward(make_step(None, chunks, 4), torch.arange(12))
    assert out.features is not None
    return target, out.logits, out.features


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_features_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    config, fuses = CONFIGS[name]
    folder = save_tiny_model(tmp_path, config)
    _, logits, features = run(folder, torch.float32, fast=False)
    target, fast_logits, fast_features = run(folder, torch.float32, fast=True)
    torch.testing.assert_close(fast_logits, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast_features, features, atol=1e-5, rtol=1e-5)
    kinds = {type(module) for module in target.model.modules()}
    assert (FusedAttention in kinds) == (FusedLayer in kinds) == fuses
    assert fuses <= (FusedMLP in kinds and FusedNorm in kinds)


def test_an_emulated_bfloat16_model_computes_in_float32_with_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "computes_in_bfloat16", lambda device: False)
    folder = save_tiny_model(tmp_path, qwen3(tie_word_embeddings=True))
    _, logits, features = run(folder, torch.bfloat16, fast=False, widen=True)
    target, fast_logits, fast_features = run(folder, torch.bfloat16, fast=True)
    torch.testing.assert_close(fast_logits, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast_features, features, atol=1e-5, rtol=1e-5)
    assert target.dtype == target.cache.data.dtype == torch.float32
    assert linear.linear_forms(target.model) == ["native-bfloat16" if native.available() else "half"]
    assert target.head.weight is target.embedding


def test_a_model_that_the_cpu_computes_as_it_is_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "computes_in_bfloat16", lambda device: True)
    folder = save_tiny_model(tmp_path, qwen3())
    loaded = load_target(str(folder), torch.bfloat16, torch.device("cpu"), attn_implementation=ATTENTION_NAME)
    assert speed_up(loaded.model) == 0
    assert loaded.model.dtype == torch.bfloat16
