"""What several tests need: tiny random models on disk, a reference decoder, and the comparison that knows near-ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from cast_ray.drafters.checkpoint import DFlashConfig, read_config
from cast_ray.drafters.dflash import DFlashModel
from cast_ray.stats import comparison
from cast_ray.stats.comparison import reference_greedy as reference_greedy


def save_tiny_model(folder: Path, config: Any, seed: int = 0, spread: float = 1.0) -> Path:
    """A random model of `config` in `folder`, with a tokenizer that knows the words `t0`, `t1`, …

    spread scales the output head: the larger, the further apart the logits.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, spread / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(config.get_text_config().vocab_size)}
    words = Tokenizer(WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    return folder


def save_tiny_drafter(folder: Path, *, target: Any, seed: int = 1, **changes: Any) -> Path:
    """A random DFlash drafter for a target config; `changes` go into its config.json."""
    text = target.get_text_config()
    raw = {
        "model_type": "qwen3",
        "hidden_size": text.hidden_size,
        "intermediate_size": 2 * text.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": text.vocab_size,
        "num_target_layers": text.num_hidden_layers,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dflash_config": {"block_size": 5, "mask_token_id": 1, "target_layer_ids": [0, text.num_hidden_layers - 1]},
    }
    raw.update(changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(seed)
    save_file(random_weights(read_config(folder)), folder / "model.safetensors")
    return folder


def random_weights(config: DFlashConfig) -> dict[str, torch.Tensor]:
    """Weights of a drafter's shape whose activations neither vanish nor blow up."""
    state = DFlashModel(config).state_dict()
    return {
        name: torch.randn_like(tensor) / tensor.shape[-1] ** 0.5
        if tensor.ndim > 1
        else 1 + 0.2 * torch.randn_like(tensor)
        for name, tensor in state.items()
    }


def dflash2_block(**changes: Any) -> dict[str, Any]:
    """The `dflash_config` of a tiny DFlash 2 drafter."""
    block = {"block_size": 5, "mask_token_id": 1, "target_layer_ids": [0, 2]}
    parts = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
    return {**block, **parts, **changes}


class Comparison(comparison.Comparison):
    """The package's own, that fails where tokens part without a tie, or ties abound."""

    def same(
        self,
        model: Any,
        prompt: list[int],
        ours: list[int],
        reference: list[int],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Token identity, except from a place on where the reference's two best scores lie within TIE."""
        self.add(model, prompt, ours, reference, temperature, seed)
        assert not self.differences, self.differences[-1]

    def check(self) -> None:
        """At most one tie in 5,000 tokens, and one by chance."""
        assert self.tokens > 0
        assert self.holds, f"{self.ties} near-ties in {self.tokens} tokens"


# A tiny model's shape, with so few tokens that a tree often holds the right one.
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


def qwen3(**changes: Any) -> Qwen3Config:
    """A tiny Qwen3."""
    return Qwen3Config(**{**TINY, **changes})
