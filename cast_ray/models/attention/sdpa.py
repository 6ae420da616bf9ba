"""Attention by PyTorch's scaled_dot_product_attention: any device, any dtype; the reference for other backends.

Grouped heads are folded into the query rows, so keys and values are read once and never repeated. Each group is one
padded call; a request whose pages are consecutive is read in place, others are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from cast_ray.models.attention.base import Group, Layer, causal_mask
from cast_ray.models.kv_cache import KVCache, slots_of


@dataclass
class _GroupPlan:
    """Key places and masks of one group; masks are made when a layer first asks for their kind."""

    group: Group
    queries: int  # Q, the padded number of new tokens
    keys: int  # K, the padded number of keys
    run_start: int | None  # first slot where the keys are consecutive
    key_slots: Tensor | None  # [b * K] int64 where they are not
    padding: Tensor | None  # [b, Q] int64 rows of the group, where segments differ in length
    masks: dict[tuple[bool, int | None, int], Tensor] = field(default_factory=dict)


@dataclass
class _Plan:
    groups: list[_GroupPlan]
    cache: KVCache


class SdpaBackend:
    """See the module. `page_size` is that of the pool whose block tables the groups carry."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def plan(self, groups: list[Group], cache: KVCache) -> _Plan:
        return _Plan([self._plan_group(group) for group in groups], cache)

    def run(self, plan: _Plan, queries: Tensor, layer: Layer) -> Tensor:
        outputs = [self._run_group(group, plan.cache, queries, layer) for group in plan.groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan_group(self, group: Group) -> _GroupPlan:
        device = group.tables.device
        queries = max(group.lengths)
        keys = max(c + n for c, n in zip(group.contexts, group.lengths, strict=True))
        padding = None
        if min(group.lengths) < queries:
            lengths = torch.tensor(group.lengths, device=device)
            starts = lengths.cumsum(0) - lengths
            columns = torch.arange(queries, device=device)
            padding = starts[:, None] + torch.minimum(columns[None], lengths[:, None] - 1)
        if len(group.lengths) == 1:
            pages = -(-keys // self.page_size)
            table = group.tables[0, :pages]
            if bool((table[1:] == table[:-1] + 1).all()):
                return _GroupPlan(group, queries, keys, int(table[0]) * self.page_size, None, padding)
        # Padding repeats a request's own last key: masked, but it must not be another's, nor memory never written.
        last = torch.tensor(group.contexts, device=device) + torch.tensor(group.lengths, device=device) - 1
        index = torch.minimum(torch.arange(keys, device=device)[None], last[:, None])
        key_slots = slots_of(group.tables, index, self.page_size).reshape(-1)
        return _GroupPlan(group, queries, keys, None, key_slots, padding)

    def _run_group(self, plan: _GroupPlan, cache: KVCache, queries: Tensor, layer: Layer) -> Tensor:
        group = plan.group
        b, q = len(group.lengths), plan.queries
        rows = queries[group.start : group.start + group.rows]
        heads, dim = rows.shape[1:]
        padded = rows if plan.padding is None else rows[plan.padding.reshape(-1)]
        keys, values = self._read(plan, cache, layer.index)
        kv_heads = keys.shape[2]
        fold = heads // kv_heads
        # [b, q, kv_heads, fold, dim] -> [b, kv_heads, fold * q, dim]: every head of a group is one more query row.
        folded = padded.view(b, q, kv_heads, fold, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, fold * q, dim)
        mask = self._mask(plan, layer, fold, rows.dtype)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if layer.softcap is None and layer.sinks is None:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scaling)
        else:
            out = _attend_explicitly(folded, keys, values, mask, layer, q)
        out = out.view(b, kv_heads, fold, q, dim).permute(0, 3, 1, 2, 4).reshape(b * q, heads, dim)
        if plan.padding is None:
            return out
        real = torch.arange(q, device=out.device)[None] < torch.tensor(group.lengths, device=out.device)[:, None]
        return out[real.reshape(-1)]

    def _read(self, plan: _GroupPlan, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[b, K, kv_heads, dim]`."""
        data, b = cache.data[layer], len(plan.group.lengths)
        if plan.key_slots is None:
            assert plan.run_start is not None
            run = data[:, plan.run_start : plan.run_start + plan.keys]
            return run[0][None], run[1][None]
        gathered = data.index_select(1, plan.key_slots).view(2, b, plan.keys, *data.shape[2:])
        return gathered[0], gathered[1]

    def _mask(self, plan: _GroupPlan, layer: Layer, fold: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[b, 1, fold * Q, K]`, made once a forward for each kind of layer."""
        kind = (layer.causal, layer.window, fold)
        if kind not in plan.masks:
            visible = visible_keys(plan.group, plan.queries, plan.keys, layer.causal, layer.window)
            zero = torch.zeros((), dtype=dtype, device=visible.device)
            plan.masks[kind] = torch.where(visible, zero, float("-inf")).repeat(1, fold, 1)[:, None]
        return plan.masks[kind]


def visible_keys(group: Group, queries: int, keys: int, causal: bool, window: int | None) -> Tensor:
    """`[b, queries, keys]` bool: which key each new token of the group sees. Rows of padding see something."""
    device = group.tables.device
    contexts = torch.tensor(group.contexts, device=device)[:, None]
    lengths = torch.tensor(group.lengths, device=device)[:, None]
    index = torch.arange(keys, device=device)[None]
    own = index - contexts  # [b, keys]: index among the segment's new tokens, negative in the cached context
    inside = (own >= 0) & (own < lengths)
    own = own.clamp(0, queries - 1)
    b = len(group.lengths)
    mask = group.mask
    if mask is None:
        square = (
            causal_mask(queries, device) if causal else torch.ones(queries, queries, dtype=torch.bool, device=device)
        )
        mask = square.expand(b, queries, queries)
    new = mask.gather(2, own[:, None].expand(b, queries, keys)) & inside[:, None]
    visible = new | (index < contexts)[:, None]
    if window is not None:
        key_positions = torch.where(index < contexts, index, group.positions.gather(1, own))
        distance = group.positions[:, :, None] - key_positions[:, None]
        near = distance < window
        if group.mask is None and not causal:
            near &= distance > -window
        visible &= near
    return visible


def _attend_explicitly(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: Layer, q: int) -> Tensor:
    """Scores written out, for the layers that SDPA has no argument for: soft caps and attention sinks."""
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores + mask
    if layer.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype), values)
    b, kv_heads, rows = scores.shape[:3]
    sinks = layer.sinks.view(1, kv_heads, -1, 1).expand(b, kv_heads, rows // q, q).reshape(b, kv_heads, rows, 1)
    scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1].to(values.dtype)
    return torch.matmul(weights, values)
