"""SDPA over buffers of fixed shape, for captured forwards: every request padded to one width and one number of keys.

The host hands over contexts, lengths, tables and trees; rows, slots and masks are made of them on the device, within
the captured region. Padded keys are gathered like real ones, so this suits short contexts and is a fallback for long
ones: where the gathered keys would be too many, the forward runs eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from cast_ray.models.attention.base import Group, Layer
from cast_ray.models.attention.explicit import attend_explicitly
from cast_ray.models.attention.parts import visible
from cast_ray.models.kv_cache import KVCache, slots_of
from cast_ray.transfer import upload

LEAST_KEYS = 128
# Gathered token places, keys of all requests, above which padding is dearer than what a graph saves.
MOST_KEYS = 1 << 17


def static_shape(group: Group, page_size: int) -> tuple[int, int, int] | None:
    """(new tokens a request, keys a request, whether there are masks): what the captured kernels' shapes depend on."""
    most = max(c + n for c, n in zip(group.contexts, group.lengths, strict=True))
    keys = max(LEAST_KEYS, 1 << (most - 1).bit_length())
    if keys * len(group.lengths) > MOST_KEYS:
        return None
    return group.positions.shape[1], keys, int(group.mask is not None)


@dataclass(frozen=True)
class _Plan:
    """rows: `[b * Q]` int64 query of each cell; back: `[T]` int64 cell of each query; slots: `[b * K]` int64."""

    rows: Tensor
    back: Tensor
    slots: Tensor
    masks: dict[tuple[bool, int | None], Tensor] = field(default_factory=dict)


class StaticSdpa:
    """See `attention.base.StaticAttention`. keys: K, places gathered of each request."""

    def __init__(self, group: Group, cache: KVCache, page_size: int, keys: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._keys = keys
        self._tokens = group.rows
        self._batch, self._queries = group.positions.shape
        device = group.tables.device
        with torch.inference_mode(False):  # written to inside inference mode and outside
            self._sizes = torch.ones(2, self._batch, dtype=torch.int64, device=device)  # contexts, lengths
            self._tables = torch.zeros(self._batch, -(-keys // page_size), dtype=torch.int64, device=device)
            self._positions = torch.zeros(self._batch, self._queries, dtype=torch.int64, device=device)
            shape = (self._batch, self._queries, self._queries)
            self._mask = None if group.mask is None else torch.zeros(shape, dtype=torch.bool, device=device)

    def fill(self, group: Group) -> None:
        sizes = upload([*group.contexts, *group.lengths], self._sizes.device)
        self._sizes.copy_(sizes.view(2, -1))
        pages = min(self._tables.shape[1], group.tables.shape[1])
        self._tables[:, :pages].copy_(group.tables[:, :pages])
        self._positions.copy_(group.positions)
        if self._mask is not None:
            assert group.mask is not None
            self._mask.copy_(group.mask)

    def begin(self) -> _Plan:
        contexts, lengths = self._sizes.unbind(0)
        device = contexts.device
        ends = lengths.cumsum(0)
        first = ends - lengths
        cells = torch.arange(self._queries, device=device)
        rows = first[:, None] + torch.minimum(cells, (lengths - 1).clamp(min=0)[:, None])
        row = torch.arange(self._tokens, device=device)
        segment = torch.searchsorted(ends, row, right=True).clamp(max=self._batch - 1)
        back = segment * self._queries + (row - first[segment])
        last = contexts + lengths - 1
        index = torch.minimum(torch.arange(self._keys, device=device), last[:, None])
        slots = slots_of(self._tables, index, self._page_size)
        return _Plan(rows.clamp(max=self._tokens - 1).reshape(-1), back, slots.reshape(-1))

    def run(self, plan: _Plan, queries: Tensor, layer: Layer) -> Tensor:
        heads, dim = queries.shape[1:]
        data = self._cache.data[layer.index]
        kv_heads, b, q = data.shape[2], self._batch, self._queries
        found = data.index_select(1, plan.slots).view(2, b, self._keys, kv_heads, dim)
        keys, values = found.transpose(2, 3).unbind(0)
        # Rows of a key head: the query heads that share it, and within each its tokens.
        cells = queries.index_select(0, plan.rows).view(b, q, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        folded = cells.reshape(b, kv_heads, -1, dim)
        mask = self._additive(plan, layer, heads // kv_heads, queries.dtype)
        if layer.softcap is None and layer.sinks is None:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scaling)
        else:
            out = attend_explicitly(folded, keys, values, mask, layer, q)
        out = out.view(b, kv_heads, -1, q, dim).permute(0, 3, 1, 2, 4).reshape(b * q, heads, dim)
        return out.index_select(0, plan.back)

    def _additive(self, plan: _Plan, layer: Layer, fold: int, dtype: torch.dtype) -> Tensor:
        """`[b, 1, fold * Q, K]`; layers of one kind share it."""
        kind = (layer.causal, layer.window)
        if kind not in plan.masks:
            contexts, lengths = self._sizes.unbind(0)
            seen = visible(
                contexts, lengths, self._positions, self._mask, self._queries, self._keys, layer.causal, layer.window
            )
            additive = torch.zeros((), dtype=dtype, device=seen.device).where(seen, float("-inf"))
            plan.masks[kind] = additive.repeat(1, fold, 1)[:, None]
        return plan.masks[kind]
