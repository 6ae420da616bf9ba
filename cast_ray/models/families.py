"""Which kinds of targets decode exactly here: those whose attention was held against transformers' own, under trees.

A target of another kind is refused before its weights are read: some would load, run, and be wrong. docs/models.md is
the table for users; tests/families.py has a small model of every family.
"""

from __future__ import annotations

from typing import Any

from cast_ray.errors import ModelError, describe

ATTENDING = {"full_attention", "sliding_attention"}
RECURRENT = "linear_attention"

# By the model type of the text config. Attention layers alone, all of them through transformers' attention interface.
PROVEN = {
    "llama": "Llama 2 and 3, SmolLM2 and others of their shape",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2 and 2.5",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE, Qwen3-Coder",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gpt_oss": "gpt-oss",
    "phi": "Phi 1 and 2",
    "phi3": "Phi-3, Phi-4 and Phi-4-mini",
    "phimoe": "Phi-3.5-MoE",
    "granite": "Granite",
    "granitemoe": "Granite MoE",
    "glm": "GLM-4 9B",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5 and 4.6",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder2",
    "cohere": "Command R",
    "cohere2": "Command R7B and Command A",
    "exaone4": "EXAONE 4",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "hunyuan_v1_dense": "Hunyuan dense",
    "hunyuan_v1_moe": "Hunyuan MoE",
    "seed_oss": "Seed-OSS",
    "helium": "Helium",
    "arcee": "Arcee",
    "apertus": "Apertus",
    "internlm3": "InternLM3",
    "minimax_m2": "MiniMax-M2",
    "dots1": "dots.llm1",
    "nanochat": "nanochat",
}

# Of those, whose windows stand in transformers' masks alone, which are not used here.
MASKED_WINDOWS = {"phimoe", "qwen2_moe"}

# With gated delta layers between the attention layers: one state a request, so chains and no trees.
HYBRID = {
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "qwen3_5_text": "Qwen3.5 and 3.6",
    "qwen3_5_moe_text": "Qwen3.5 and 3.6 MoE",
}


def check_family(config: Any, name: str) -> None:
    """ModelError where a target's config is of a kind that is not known to decode exactly. name: what the user said."""
    text = config.get_text_config()
    kind = str(text.model_type)
    if getattr(text, "kv_lora_rank", None):
        problem = "keeps compressed keys and values (multi-head latent attention), which this cache has no place for"
        raise ModelError(describe("target", name, problem, "Use a target with plain or grouped heads"))
    if getattr(text, "use_bidirectional_attention", None):
        problem = "attends to tokens behind as well as before (use_bidirectional_attention)"
        raise ModelError(describe("target", name, problem, "Use a model that decodes from left to right"))
    known = ATTENDING | {RECURRENT} if kind in HYBRID else ATTENDING
    if unknown := set(layer_kinds(text)) - known:
        problem = f"has layers of kind {', '.join(sorted(unknown))} ({kind}), whose state this engine does not keep"
        raise ModelError(describe("target", name, problem, _remedy()))
    window = _window(text)
    if kind in MASKED_WINDOWS and window is not None and window < text.max_position_embeddings:
        problem = f"has windows of {window} tokens, which layers of this family ({kind}) do not tell the attention"
        remedy = f"Set max_position_embeddings to {window} in its config.json, if contexts need be no longer"
        raise ModelError(describe("target", name, problem, remedy))
    if kind not in PROVEN and kind not in HYBRID:
        problem = f"is of a family ({kind}) that was not proven to decode exactly under this engine's attention"
        raise ModelError(describe("target", name, problem, _remedy()))


def layer_kinds(text: Any) -> list[str]:
    """The kind of each layer of a text config; all attend fully where it says nothing."""
    kinds = getattr(text, "layer_types", None)
    return [str(kind) for kind in kinds] if kinds else ["full_attention"] * int(text.num_hidden_layers)


def _window(text: Any) -> int | None:
    """Tokens that the layers with a sliding window see; None where there are none."""
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in layer_kinds(text) or not getattr(text, "layer_types", None)
    return int(window) if window and slides else None


def is_recurrent(text: Any) -> bool:
    """Whether some layers of a text config keep a state that branches of a tree cannot share."""
    return RECURRENT in layer_kinds(text)


def _remedy() -> str:
    return f"Use one of: {', '.join([*PROVEN, *HYBRID])} (docs/models.md)"
