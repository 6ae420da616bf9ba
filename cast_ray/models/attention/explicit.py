"""Attention written out, for layers that PyTorch's scaled_dot_product_attention has no argument for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cast_ray.models.attention.base import Layer


def attend_explicitly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, layer: Layer, q: int
) -> Tensor:
    """Scores written out, for the layers that SDPA has no argument for: soft caps and attention sinks.

    q: new tokens of a request; rows count the heads of a key head first, then its tokens.
    """
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype), values)
    b, kv_heads, rows = scores.shape[:3]
    sinks = layer.sinks.view(kv_heads, -1).repeat_interleave(q, dim=1)
    sinks = F.pad(sinks, (0, rows - sinks.shape[1])).expand(b, -1, -1)[..., None]
    scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1].to(values.dtype)
    return torch.matmul(weights, values)
