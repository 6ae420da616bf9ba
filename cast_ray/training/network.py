"""The drafter's network over many blocks of many sequences at once, as training needs it, and a fresh one.

It runs the very modules that draft, so what is trained is what is exported. Inference, with pages and caches, is
`drafters.dflash`; the two are tested equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from cast_ray.drafters.checkpoint import DFlashConfig
from cast_ray.drafters.dflash import DFlashModel


def new_network(config: DFlashConfig, embedding: Tensor, seed: int) -> DFlashModel:
    """A network with random weights: normal matrices, smaller where they add to the residual stream.

    embedding: the target's, `[vocab, hidden]`. What DFlash 2 adds starts as if it were not there: convolutions let
    their rows pass, pair scores are zero. The selector knows a preceding token by a projection of its embedding, so
    that like tokens start alike.
    """
    network = DFlashModel(config)
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * config.model.num_hidden_layers) ** 0.5
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                spread = module.in_features**-0.5
                if name.endswith(("o_proj", "down_proj")):
                    spread /= depth
                module.weight.normal_(0.0, spread, generator=generator)
                if name.endswith("kernel_projection"):
                    module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
        if network.candidate_selector is not None:
            codebook = network.candidate_selector.predecessor_codebook.weight
            projection = torch.randn(embedding.shape[1], codebook.shape[1], generator=generator)
            projected = embedding.detach().float().cpu() @ projection
            codebook.copy_((projected - projected.mean(dim=0)) / projected.std(dim=0).clamp(min=1e-6))
            network.candidate_selector.successor_codebook.weight.zero_()
    return network


def block_hidden(network: Any, features: Tensor, roots: Tensor, blocks: Tensor) -> Tensor:
    """Normed hidden states of every block, each seeing its own context.

    features: `[S, C, taps * hidden]`, zero-padded; roots: `[S, A]` int64 positions of the roots; a block sees
    the context before its own; blocks: `[S, A, B, hidden]` embeddings -> `[S, A, B, hidden]`.
    """
    context = network.context(features)
    offsets = torch.arange(blocks.shape[2], device=blocks.device)
    places = torch.arange(features.shape[1], device=blocks.device)
    positions = roots[:, :, None] + offsets
    around = network.rotary_emb(blocks, places[None])
    inside = network.rotary_emb(blocks, positions.flatten(1))
    for layer in network.layers:
        blocks = _layer(layer, blocks, context, positions, around, inside)
    return network.norm(blocks)


def _layer(
    layer: Any,
    blocks: Tensor,
    context: Tensor,
    positions: Tensor,
    around: tuple[Tensor, Tensor],
    inside: tuple[Tensor, Tensor],
) -> Tensor:
    """One decoder layer. A layer with convolutions (DFlash 2) has them around attention and MLP, along each block."""
    rows, conv = _before(getattr(layer, "attention_conv", None), layer.input_layernorm(blocks))
    rows = _after(conv, _attend(layer.self_attn, rows, context, positions, around, inside))
    blocks = blocks + rows
    rows, conv = _before(getattr(layer, "mlp_conv", None), layer.post_attention_layernorm(blocks))
    return blocks + _after(conv, layer.mlp(rows))


def _before(conv: Any, rows: Tensor) -> tuple[Tensor, Any]:
    if conv is None:
        return rows, None
    conv.block_size = rows.shape[2]  # blocks may be cut short in training
    out, kernel = conv.prepare(rows.flatten(0, 2))
    return out.view_as(rows), (conv, kernel)


def _after(conv: Any, rows: Tensor) -> Tensor:
    return rows if conv is None else conv[0].finish(rows.flatten(0, 2), conv[1]).view_as(rows)


def _attend(
    attention: Any,
    blocks: Tensor,
    context: Tensor,
    positions: Tensor,
    around: tuple[Tensor, Tensor],
    inside: tuple[Tensor, Tensor],
) -> Tensor:
    """Scores of context and block are computed apart: a block sees all of one and only its own of the other."""
    sequences, anchors, size, _ = blocks.shape
    dim = attention.head_dim
    queries = attention.q_norm(attention.q_proj(blocks).view(sequences, anchors * size, -1, dim))
    own_keys = attention.k_norm(attention.k_proj(blocks).view(sequences, anchors * size, -1, dim))
    keys = attention.k_norm(attention.k_proj(context).view(sequences, context.shape[1], -1, dim))
    queries, own_keys, keys = _rotate(queries, inside), _rotate(own_keys, inside), _rotate(keys, around)
    own_values = attention.v_proj(blocks).view(sequences, anchors, size, -1, dim)
    values = attention.v_proj(context).view(sequences, context.shape[1], -1, dim)
    kv_heads = keys.shape[2]
    fold = queries.shape[2] // kv_heads

    # Heads that share keys are more rows of the same product: [S, kv, A, fold * B, dim].
    queries = queries.view(sequences, anchors, size, kv_heads, fold, dim).permute(0, 3, 1, 4, 2, 5)
    queries = queries.reshape(sequences, kv_heads, anchors, fold * size, dim)
    own_keys = own_keys.view(sequences, anchors, size, kv_heads, dim).permute(0, 3, 1, 2, 4)
    own_values = own_values.permute(0, 3, 1, 2, 4)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)

    scores = torch.matmul(queries.flatten(2, 3), keys.transpose(2, 3)).unflatten(2, (anchors, fold * size))
    own_scores = torch.matmul(queries, own_keys.transpose(3, 4))
    unseen, own_unseen = _unseen(positions, context.shape[1], attention.layer)
    scores = scores.unflatten(3, (fold, size)).masked_fill(unseen[:, None, :, None], float("-inf")).flatten(3, 4)
    if own_unseen is not None:
        own_scores = own_scores.unflatten(3, (fold, size)).masked_fill(own_unseen, float("-inf")).flatten(3, 4)
    joint = torch.cat([scores, own_scores], dim=-1).float() * attention.layer.scaling
    weights = joint.softmax(dim=-1).to(values.dtype)
    seen, own = weights.split([context.shape[1], size], dim=-1)
    out = torch.matmul(seen.flatten(2, 3), values).view_as(queries) + torch.matmul(own, own_values)
    out = out.unflatten(3, (fold, size)).permute(0, 2, 4, 1, 3, 5)
    return attention.o_proj(out.reshape(sequences, anchors, size, -1))


def _unseen(positions: Tensor, context: int, layer: Any) -> tuple[Tensor, Tensor | None]:
    """What block positions do not see: of the context `[S, A, B or 1, C]`, of their block `[B, B]` (None: nothing)."""
    places = torch.arange(context, device=positions.device)
    unseen = places >= positions[:, :, :1, None]
    offsets = torch.arange(positions.shape[2], device=positions.device)
    distance = offsets[:, None] - offsets
    own: Tensor | None = distance < 0 if layer.causal else None
    if layer.window is not None:
        unseen = unseen | (positions[..., None] - places >= layer.window)
        far = distance >= layer.window if layer.causal else distance.abs() >= layer.window
        own = far if own is None else own | far
    return unseen, own


def _rotate(rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding: rows `[S, n, heads, dim]`, angles two `[S or 1, n, dim]`."""
    cos, sin = angles
    return rows * cos[:, :, None] + rotate_half(rows) * sin[:, :, None]
