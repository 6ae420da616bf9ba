"""Tiny configs of every family that the engine takes, each with what is special about its attention turned on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import CONFIG_MAPPING

# So few tokens that a tree often holds the right one; so short a window that prompts reach beyond it.
TINY: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": 9}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def of(model_type: str, **changes: Any) -> Callable[[], Any]:
    """A maker of a tiny config of this type."""
    return lambda: CONFIG_MAPPING[model_type](**{**TINY, **changes})


def gemma3_with_eyes() -> Any:
    """The shape of Gemma 3 from 4B on: the text config inside one with a vision tower."""
    text = of("gemma3_text", **MIXED, query_pre_attn_scalar=8, rope_parameters=LOCAL_AND_GLOBAL)().to_dict()
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {**tower, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    return CONFIG_MAPPING["gemma3"](
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=False
    )


LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}

# By a name of our own: the most used ones, which run through whole engines.
MAIN: dict[str, Callable[[], Any]] = {
    "qwen3": of("qwen3"),
    "llama3_rope": of("llama", rope_parameters=LLAMA3),
    "mistral_sliding": of("mistral", **SLIDING),
    # The shape of 30B-A3B: every layer of experts, weights of the chosen ones normalised, heads wider than the hidden
    # size divided among them.
    "qwen3_moe": of("qwen3_moe", **EXPERTS, head_dim=16, norm_topk_prob=True, decoder_sparse_step=1),
    "gemma2_softcap": of(
        "gemma2", **MIXED, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=8.0
    ),
    "gemma3_with_eyes": gemma3_with_eyes,
    "gpt_oss_sinks": of("gpt_oss", **MIXED, **LOCAL_EXPERTS, rope_parameters=YARN),
}
# Those that one forward of trees and chunks is held against transformers' own for.
OTHERS: dict[str, Callable[[], Any]] = {
    "llama": of("llama"),
    "ministral": of("ministral", **MIXED),
    "ministral3": of(
        "ministral3", rope_parameters={**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
    ),
    "mixtral": of("mixtral", **LOCAL_EXPERTS, **SLIDING),
    "qwen2": of("qwen2", **MIXED, use_sliding_window=True),
    "qwen2_moe": of("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_sliding": of("qwen3", **MIXED, use_sliding_window=True),
    "qwen3_moe_sliding": of("qwen3_moe", **EXPERTS, **SLIDING, use_sliding_window=True),
    "gemma": of("gemma"),
    "gemma3_text": of("gemma3_text", **MIXED, query_pre_attn_scalar=8, rope_parameters=LOCAL_AND_GLOBAL),
    "phi": of("phi", partial_rotary_factor=0.5),
    "phi3": of("phi3", **SLIDING),
    "phimoe": of("phimoe", **LOCAL_EXPERTS, sliding_window=512),
    "granite": of("granite", attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5),
    "granitemoe": of("granitemoe", **LOCAL_EXPERTS, attention_multiplier=0.3),
    "glm": of("glm", partial_rotary_factor=0.5),
    "glm4": of("glm4", partial_rotary_factor=0.5),
    "glm4_moe": of("glm4_moe", **ROUTED, use_qk_norm=True, partial_rotary_factor=0.5),
    "olmo": of("olmo", clip_qkv=2.0),
    "olmo2": of("olmo2"),
    "olmo3": of("olmo3", **MIXED),
    "olmoe": of("olmoe", num_experts=4, num_experts_per_tok=2),
    "smollm3": of("smollm3", no_rope_layers=[1, 1, 0]),
    "starcoder2": of("starcoder2", **SLIDING),
    "cohere": of("cohere", use_qk_norm=True),
    "cohere2": of("cohere2", **MIXED),
    "exaone4": of("exaone4", **MIXED),
    "ernie4_5": of("ernie4_5"),
    "ernie4_5_moe": of("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1),
    "hunyuan_v1_dense": of("hunyuan_v1_dense"),
    "hunyuan_v1_moe": of("hunyuan_v1_moe", num_experts=4, moe_topk=2),
    "seed_oss": of("seed_oss"),
    "helium": of("helium"),
    "arcee": of("arcee"),
    "apertus": of("apertus"),
    "internlm3": of("internlm3"),
    "minimax_m2": of("minimax_m2", **LOCAL_EXPERTS, partial_rotary_factor=0.5),
    "dots1": of("dots1", **ROUTED, **MIXED),
    "nanochat": of("nanochat"),
}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3_next": of("qwen3_next", **DELTA, **EXPERTS, shared_expert_intermediate_size=32, partial_rotary_factor=0.25),
    "qwen3_5": of("qwen3_5_text", **DELTA),
    "qwen3_5_moe": of("qwen3_5_moe_text", **DELTA, **EXPERTS, shared_expert_intermediate_size=32),
}
