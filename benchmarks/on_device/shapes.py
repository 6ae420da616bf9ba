"""Models of the shapes to be measured, with random weights made on the device, and an engine over them.

The weights are random but for one thing: the output head is laid out so that the target's own next token is always
`token + STRIDE`, by a margin that no rounding reaches. So what it would say is known without running it, and the
forward costs what it costs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from cast_ray.config import EngineConfig
from cast_ray.drafters.checkpoint import DFlashConfig, read_config
from cast_ray.drafters.dflash import DFlashDrafter, DFlashModel
from cast_ray.engine import engine as engines
from cast_ray.engine import setup
from cast_ray.models.loading import LoadedTarget
from cast_ray.models.target import ATTENTION_NAME, Target

STRIDE = 7919  # prime, so that a run of tokens does not repeat
# Of a layer's own output: small beside the embedding, so that the last state still says which token it is.
QUIET = 0.01


@dataclass(frozen=True)
class Shape:
    """A target and its DFlash drafter, as their configs have them."""

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]

    def target_config(self) -> Qwen3Config:
        return Qwen3Config(**self.target, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0)


def _qwen3(name: str, hidden: int, inner: int) -> Shape:
    """Qwen3-4B or 8B and a DFlash drafter of five layers; heads and vocabulary are the same in both."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    common = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 151936, **heads}
    common |= {"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    block = {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    drafter = {**common, "num_hidden_layers": 5, "num_target_layers": 36, "dflash_config": block}
    return Shape(name, {**common, "num_hidden_layers": 36}, {**drafter, "model_type": "qwen3"})


def tiny() -> Shape:
    """For a CPU, in a moment."""
    common = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 499, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    block = {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [0, 1]}
    drafter = {**common, "num_hidden_layers": 1, "num_target_layers": 2, "dflash_config": block}
    return Shape("tiny", {**common, "num_hidden_layers": 2}, {**drafter, "model_type": "qwen3"})


SHAPES = {"qwen3-8b": _qwen3("qwen3-8b", 4096, 12288), "qwen3-4b": _qwen3("qwen3-4b", 2560, 9728), "tiny": tiny()}


@torch.no_grad()
def make_target(shape: Shape, device: torch.device, dtype: torch.dtype) -> LoadedTarget:
    """The target. See the module for what its weights are."""
    config = shape.target_config()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model.eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(QUIET)
        layer.mlp.down_proj.weight.mul_(QUIET)
    embedding = model.get_input_embeddings().weight.normal_()
    # Row v of the head is the embedding of the token before v.
    model.get_output_embeddings().weight.copy_(embedding.roll(STRIDE, dims=0))
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0")
    return LoadedTarget(model, tokenizer, shape.name, "random weights", (), config.max_position_embeddings)


def make_drafter(config: DFlashConfig, target: Target, slots: int, page_size: int) -> DFlashDrafter:
    """A drafter with random weights: what it proposes is worth nothing, what it costs is real."""
    with torch.device(target.device):
        network = DFlashModel(config)
    rotary = network.rotary_emb
    network.requires_grad_(False).to(target.dtype).eval()
    network.rotary_emb = type(rotary)(config.model).to(target.device)
    return DFlashDrafter(config, network, target, slots, page_size)


@contextmanager
def engine_of(shape: Shape, loaded: LoadedTarget, config: EngineConfig) -> Iterator[engines.Engine]:
    """An engine over models that lie in no folder, started as any other: attention, memory, graphs, latency table."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.drafter), encoding="utf-8")
        drafter = read_config(Path(folder))
        weights = sum(p.numel() for p in _without_memory(drafter).parameters()) * loaded.model.dtype.itemsize

        def load(name: str, *given: Any, **more: Any) -> LoadedTarget:
            return loaded

        def load_drafter(where: Path, read: DFlashConfig, target: Target, slots: int, page_size: int) -> DFlashDrafter:
            return make_drafter(read, target, slots, page_size)

        found = config.replace(target=shape.name, drafter=folder, profile_dir=Path(folder))
        with (
            mock.patch.object(setup, "load_target", load),
            mock.patch.object(setup, "load_dflash", load_drafter),
            mock.patch.object(setup, "weight_bytes", return_value=weights),
        ):
            engine = engines.Engine(found)
        yield engine


def _without_memory(config: DFlashConfig) -> DFlashModel:
    """The drafter's network without memory, for its size."""
    with torch.device("meta"):
        return DFlashModel(config)
