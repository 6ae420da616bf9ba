"""Attention by PyTorch's scaled_dot_product_attention: any device, any dtype; the reference for other backends.

Grouped heads are folded into the query rows, so keys and values are read once and never repeated. Each part of the
batch (see `parts`) is one dense call: over the pool itself where a request's pages follow each other, else over keys
and values gathered into a buffer that all layers share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from cast_ray.models.attention.base import Group, Layer
from cast_ray.models.attention.explicit import attend_explicitly
from cast_ray.models.attention.parts import Part, cut
from cast_ray.models.attention.static_sdpa import StaticSdpa, static_shape
from cast_ray.models.kv_cache import KVCache

# On a CPU, the gathered keys and values of one part should fit its last-level cache with room to spare.
PART_BYTES = 4 << 20


@dataclass
class _Plan:
    """parts: in the order of `order`'s rows. order: for a number of query heads, see `_Order`."""

    parts: list[Part]
    cache: KVCache
    order: dict[int, _Order] = field(default_factory=dict)


@dataclass(frozen=True)
class _Order:
    """Between rows of the flattened batch and rows of the parts, both viewed as `[n, dim]`.

    into: int64 query rows of all parts; back: `[T * heads]` int64, where each query's output lies among the parts'.
    rows: how many of `into` each part has.
    """

    into: Tensor
    back: Tensor
    rows: list[int]


class SdpaBackend:
    """See the module. `page_size` is that of the pool whose block tables the groups carry.

    looks: whether plans may look at page numbers, to attend over the pool itself; by default where that waits for
    nothing, on a CPU.
    """

    def __init__(self, page_size: int, *, looks: bool | None = None) -> None:
        self.page_size = page_size
        self.looks = looks
        self._buffer = torch.empty(0)

    def plan(self, groups: list[Group], cache: KVCache) -> _Plan:
        data = cache.data
        most = None
        if data.device.type == "cpu":
            most = PART_BYTES // (2 * data.shape[3] * data.shape[4] * data.element_size())
        looks = data.device.type == "cpu" if self.looks is None else self.looks
        return _Plan([part for group in groups for part in cut(group, self.page_size, most, looks=looks)], cache)

    def run(self, plan: _Plan, queries: Tensor, layer: Layer) -> Tensor:
        heads, dim = queries.shape[1:]
        kv_heads = plan.cache.data.shape[3]
        if heads not in plan.order:
            plan.order[heads] = _order(plan.parts, queries.shape[0], heads, kv_heads)
        order = plan.order[heads]
        laid_out = queries.reshape(-1, dim).index_select(0, order.into)
        fold = heads // kv_heads
        outputs = [
            self._run_part(part, plan.cache, rows.view(part.batch, kv_heads, -1, dim), layer, fold)
            for part, rows in zip(plan.parts, laid_out.split(order.rows), strict=True)
        ]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, order.back).view(-1, heads, dim)

    def static_shape(self, group: Group) -> tuple[int, ...] | None:
        return static_shape(group, self.page_size)

    def reserve(self, group: Group, cache: KVCache) -> StaticSdpa:
        shape = self.static_shape(group)
        assert shape is not None
        return StaticSdpa(group, cache, self.page_size, keys=shape[1])

    def _run_part(self, part: Part, cache: KVCache, queries: Tensor, layer: Layer, fold: int) -> Tensor:
        """queries `[b, kv_heads, rows, dim]` -> `[b * kv_heads * rows, dim]`."""
        keys, values = self._read(part, cache, layer.index)
        mask = part.mask(layer.causal, layer.window, fold, queries.dtype)
        if layer.softcap is None and layer.sinks is None:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scaling)
        else:
            out = attend_explicitly(queries, keys, values, mask, layer, part.queries)
        return out.reshape(-1, out.shape[-1])

    def _read(self, part: Part, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[b, kv_heads, K, dim]`, views of the pool or of the buffer."""
        data = cache.data[layer]
        if part.key_slots is None:
            assert part.run_start is not None
            found = data[:, part.run_start : part.run_start + part.keys]
        else:
            shape = (2, part.key_slots.shape[0], *data.shape[2:])
            found = torch.index_select(data, 1, part.key_slots, out=self._room(shape, data))
        return found.view(2, part.batch, part.keys, *data.shape[2:]).transpose(2, 3).unbind(0)  # type: ignore[return-value]

    def _room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape in the buffer: fresh memory for every layer would cost more than the copy."""
        count = torch.Size(shape).numel()
        if self._buffer.numel() < count or self._buffer.dtype != like.dtype or self._buffer.device != like.device:
            with torch.inference_mode(False):  # so that it can be written to inside inference mode and outside
                self._buffer = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._buffer[:count].view(shape)


def _order(parts: list[Part], tokens: int, heads: int, kv_heads: int) -> _Order:
    indices, reals = zip(*(part.query_index(heads, kv_heads) for part in parts), strict=True)
    into, real = torch.cat(indices), torch.cat(reals)
    # Rows of padding repeat a real one: they go behind all, to a place that is dropped.
    back = torch.empty(tokens * heads + 1, dtype=torch.int64, device=into.device)
    back[torch.where(real, into, tokens * heads)] = torch.arange(into.shape[0], device=into.device)
    return _Order(into, back[:-1], [index.shape[0] for index in indices])
