"""Which targets the compiled decoder takes: those whose layers are all fused, alike, and of shapes that it knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from cast_ray.models.fused import FusedAttention, FusedLayer, FusedMLP, FusedNorm, SignedRotary
from cast_ray.models.linear import PackedLinear
from cast_ray.models.native.calls import NativeLinear
from cast_ray.models.native.decoder import LayerParts, NativeDecoder
from cast_ray.models.native.products import COLUMNS


def native_decoder(model: Any) -> NativeDecoder | None:
    """The compiled decoder of a target that `fused.speed_up` has been through, None where it does not fit."""
    decoder = model.get_decoder()
    layers = list(decoder.layers)
    if model.dtype != torch.float32 or model.device.type != "cpu" or not all(map(_fits, layers)):
        return None
    known = {"norm": FusedNorm, "rotary_emb": SignedRotary}
    if not all(isinstance(getattr(decoder, name, None), kind) for name, kind in known.items()):
        return None
    attention = layers[0].self_attn
    norms = [module for module in decoder.modules() if isinstance(module, FusedNorm)]
    shapes = {(layer.self_attn.head_dim, layer.self_attn.heads, layer.self_attn.kv_heads) for layer in layers}
    if len(shapes) != 1 or len({norm.eps for norm in norms}) != 1:
        return None
    rotary = getattr(decoder.rotary_emb.rotary, "inv_freq", None)
    if rotary is None or 2 * rotary.shape[0] != attention.head_dim:
        return None
    return NativeDecoder(
        [_parts(layer) for layer in layers],
        decoder.norm.plain,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        dim=attention.head_dim,
        eps=decoder.norm.eps,
        scale=attention.layer.scaling,
    )


def _fits(layer: Any) -> bool:
    if type(layer) is not FusedLayer or type(layer.self_attn) is not FusedAttention or type(layer.mlp) is not FusedMLP:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.qkv_proj, attention.o_proj, mlp.gate_up, mlp.down_proj]
    return (
        all(isinstance(linear, PackedLinear) and linear.native is not None for linear in linears)
        and attention.layer.window is None
        and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        and attention.head_dim % COLUMNS == 0
        and mlp.down_proj.in_features % COLUMNS == 0
    )


def _parts(layer: Any) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerParts(
        _native(attention.qkv_proj),
        _native(attention.o_proj),
        _native(mlp.gate_up),
        _native(mlp.down_proj),
        (layer.input_layernorm.plain, layer.post_attention_layernorm.plain),
        (_weight(attention.q_norm), _weight(attention.k_norm)),
    )


def _native(linear: PackedLinear) -> NativeLinear:
    assert linear.native is not None
    return linear.native


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm.plain
