"""Small checkpoints on disk as users have them: folders, GGUF files, a hub's cache; and how one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cast_ray.errors import ModelError
from cast_ray.models.loading import load_target

CPU = torch.device("cpu")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ġ", "a"), ("1", "2")]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *("".join(pair) for pair in MERGES)])}
SHAPE = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Copies, because `load_file` maps the file that some tests then cut short."""
    return {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}


def write_tokenizer(folder: Path) -> None:
    backend = Tokenizer(token_models.BPE(vocab=VOCAB, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.save_pretrained(folder)


def write_folder(folder: Path, kind: str = "llama", **changes: object) -> Path:
    torch.manual_seed(0)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(name: str | Path, *words: str, **options: object) -> None:
    """Loading fails with one ModelError that names the target and says all these words."""
    with pytest.raises(ModelError) as caught:
        load_target(str(name), torch.float32, CPU, **options)
    message = str(caught.value)
    assert message.startswith(f"target={str(name)!r}"[:60])
    for word in words:
        assert word in message


def cache_hub_model(tmp_path: Path, hub_id: str) -> Path:
    repo = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    return write_folder(repo / "snapshots" / ("a" * 40))


def write_gguf(path: Path, architecture: str = "llama", without: str = "") -> Path:
    """A random model of SHAPE in float32 as llama.cpp writes it, with a vocabulary of bytes and MERGES."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(VOCAB))
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(VOCAB) - 3))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    wide, inner, keys = SHAPE["hidden_size"], SHAPE["intermediate_size"], 16
    shapes = {"token_embd.weight": (len(VOCAB), wide), "output_norm.weight": (wide,)}
    for i in range(SHAPE["num_hidden_layers"]):
        for name, shape in {
            "attn_norm": (wide,),
            "attn_q": (wide, wide),
            "attn_k": (keys, wide),
            "attn_v": (keys, wide),
            "attn_output": (wide, wide),
            "ffn_norm": (wide,),
            "ffn_gate": (inner, wide),
            "ffn_up": (inner, wide),
            "ffn_down": (wide, inner),
        }.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if name != without:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
