"""The decoder layers of Llama, Qwen and Mistral models with fewer and larger operations, on a CPU.

Query, key and value projections are one product, gate and up another; rotary embedding runs once over all heads, in
place; a norm is four operations. Around the layers stays the Hugging Face model, and models of other kinds keep theirs
too: they get packed linear layers alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
    MistralRMSNorm,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

from cast_ray.models.attention.base import Attending, Layer
from cast_ray.models.linear import PackedLinear, can_pack, pack_linears

ATTENTIONS = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)
# Kinds of rotary embedding whose frequencies do not depend on the positions asked for.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
# Beyond so many positions (16 MB of angles at 64 dimensions) angles are computed when they are needed.
TABLE_POSITIONS = 32768
NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


class FusedNorm(nn.Module):
    """Root-mean-square norm: `x * weight * sqrt(n) / hypot(|x|, sqrt(n * eps))` over the last n values.

    plain, eps: the norm's weight `[n]` and epsilon as the model has them.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        size = norm.weight.numel()
        self.plain, self.eps = norm.weight.detach().clone(), float(norm.variance_epsilon)
        self._least: Tensor
        self.weight = nn.Parameter(norm.weight.detach() * size**0.5, requires_grad=False)
        self.register_buffer("_least", torch.tensor((size * float(norm.variance_epsilon)) ** 0.5), persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
        return torch.mul(hidden_states, self.weight).div_(torch.hypot(length, self._least))


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up = _join([mlp.gate_proj, mlp.up_proj])
        self.down_proj = _join([mlp.down_proj])
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate).mul_(up))


class FusedAttention(nn.Module):
    """A grouped-head attention block that hands its heads to the engine's attention without detours."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.head_dim = int(block.head_dim)
        self.heads = block.q_proj.out_features // self.head_dim
        self.kv_heads = block.k_proj.out_features // self.head_dim
        self.qkv_proj = _join([block.q_proj, block.k_proj, block.v_proj])
        self.o_proj = _join([block.o_proj])
        self.q_norm = getattr(block, "q_norm", None)
        self.k_norm = getattr(block, "k_norm", None)
        window = getattr(block, "sliding_window", None)
        if isinstance(block, MistralAttention):  # its window stands in the config, for all layers
            window = getattr(block.config, "sliding_window", None)
        self.layer = Layer(index=int(block.layer_idx), scaling=float(block.scaling), window=window)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attending: Attending | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states `[1, T, hidden]`; position_embeddings: of `SignedRotary`."""
        assert attending is not None, "a fused block runs inside Target.forward only"
        rows = self.qkv_proj(hidden_states[0]).view(hidden_states.shape[1], -1, self.head_dim)
        turned, values = rows.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = turned.split([self.heads, self.kv_heads], dim=1)
            turned = torch.cat([self.q_norm(queries), self.k_norm(keys)], dim=1)
        cos, sin = position_embeddings
        half_turn = turned.roll(self.head_dim // 2, dims=-1)
        turned = turned.mul_(cos).addcmul_(half_turn, sin)
        queries, keys = turned.split([self.heads, self.kv_heads], dim=1)
        out = attending.attend(queries, keys, values, self.layer)
        return self.o_proj(out.reshape(1, out.shape[0], -1)), None


class FusedLayer(nn.Module):
    """A pre-norm decoder layer of fused parts; sums into what its products made."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attending: Attending | None = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states `[1, T, hidden]`, left as it is: a drafter may read it."""
        out, _weights = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, attending)
        between = out.add_(hidden_states)
        return self.mlp(self.post_attention_layernorm(between)).add_(between)


class SignedRotary(nn.Module):
    """A rotary embedding's cosines and sines `[T, 1, head_dim]`, with the sign of the half turn in the sines.

    rotate_half(x) * sin = roll(x, head_dim / 2) * signed_sin, without a negation and a copy in every layer.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._known: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, position_ids)
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[0, :, None], signed[0, :, None]

    def look_up(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward` for `[T]` positions; where frequencies are fixed, from a table made at the first call."""
        length = int(getattr(self.rotary, "max_seq_len_cached", 0))
        if getattr(self.rotary, "rope_type", None) not in FIXED_ROTARY or not 0 < length <= TABLE_POSITIONS:
            return self(x, positions[None])
        if self._known is None:
            self._known = self(x, torch.arange(length)[None])
        cos, sin = self._known
        return cos.index_select(0, positions), sin.index_select(0, positions)


def speed_up(model: PreTrainedModel) -> int:
    """Pack a target's linear layers and fuse its blocks where their kinds are known, in place.

    A bfloat16 model then holds its weights in 16 bits and computes in float32.
    Returns how many modules were replaced: 0 where `linear.can_pack` says no.
    """
    if not can_pack(model):
        return 0
    decoder = model.get_decoder()
    attentions = [getattr(layer, "self_attn", None) for layer in decoder.layers]
    count = _replace(decoder, MLPS, FusedMLP)
    # One rotary embedding serves all layers, so they change together or not at all.
    if all(type(block) in ATTENTIONS for block in attentions) and hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = SignedRotary(decoder.rotary_emb)
        for layer, block in zip(decoder.layers, attentions, strict=True):
            layer.self_attn = FusedAttention(block)
            count += 1
        for place, layer in enumerate(decoder.layers):
            if type(layer) in LAYERS:
                decoder.layers[place] = FusedLayer(layer)
                count += 1
    count += pack_linears(model, keep=model.get_output_embeddings())
    model.float()  # what is left: embedding, norms
    count += _replace(decoder, NORMS, FusedNorm)  # these scale their weights, so not in 16 bits
    _return_free_memory()
    return count


def speed_up_network(network: nn.Module) -> int:
    """Fuse the MLPs and norms of a drafter's network and pack its linear layers, in place. Returns how many."""
    if not can_pack(network):
        return 0
    return _replace(network, MLPS, FusedMLP) + pack_linears(network) + _replace(network, NORMS, FusedNorm)


def _replace(module: nn.Module, kinds: tuple[type[nn.Module], ...], by: Callable[[Any], nn.Module]) -> int:
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in kinds:
                setattr(parent, name, by(child))
                count += 1
    return count


def _return_free_memory() -> None:
    """Hand the plain weights' memory back to the system; glibc would keep the holes for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _join(linears: list[nn.Linear]) -> PackedLinear:
    return PackedLinear([layer.weight for layer in linears], [layer.bias for layer in linears], keep=False)
