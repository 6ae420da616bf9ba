"""What several tests need: tiny random models on disk, a reference decoder, and the comparison that knows near-ties."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from cast_ray import Engine, EngineConfig
from cast_ray.drafters.checkpoint import DFlashConfig, read_config
from cast_ray.drafters.dflash import DFlashModel
from cast_ray.stats import comparison
from cast_ray.stats.comparison import reference_greedy as reference_greedy
from tests.byte_tokenizer import byte_level
from tests.families import TINY as TINY


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


def save_spelling_pair(folder: Path, make: Callable[..., Any]) -> None:
    """`target` and `drafter` in `folder`: of bytes, so it can write any text, with the tokenizer's end token.

    make: a tiny config, from what is to differ of it.
    """
    tokenizer = byte_level()
    ends = tokenizer.eos_token_id
    config = make(vocab_size=len(tokenizer), eos_token_id=ends, max_position_embeddings=1024)
    save_tiny_model(folder / "target", config)
    tokenizer.save_pretrained(folder / "target")
    path = folder / "target" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    save_tiny_drafter(folder / "drafter", target=config)


def tiny_engine(target: Path, drafter: Path | str | None, width: str, /, **changes: Any) -> Engine:
    """An engine in float32 on the CPU whose small pages, steps and batches make every border come often.

    A random drafter is to go on drafting, so nothing watches it. Profiles lie beside the target. `changes`: settings.
    """
    settings: dict[str, Any] = {
        "target": str(target),
        "drafter": "none" if drafter is None else str(drafter),
        "width": width,
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_batch_size": 5,
        "max_step_tokens": 24,
        "probe_seconds": 1.0,
        "watch_drafter": False,
        "profile_dir": target / "profiles",
    }
    return Engine(EngineConfig(**{**settings, **changes}))


def tiny_prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Token prompts of unlike lengths over a tiny model's vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(12) for _ in range(rng.choice([1, 2, 5, 17, 40]))] for _ in range(count)]


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


def qwen3(**changes: Any) -> Qwen3Config:
    """A tiny Qwen3."""
    return Qwen3Config(**{**TINY, **changes})
