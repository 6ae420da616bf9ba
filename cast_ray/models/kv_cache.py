"""The paged KV pool: which pages are free, where each token of a request lives, and the tensors behind it.

A *page* is `page_size` token places. A *slot* is one token place in the pool, `page * page_size + offset`. Target and
drafter keep their own tensors but share pages and slots, so one block table serves both. Nothing here knows requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from cast_ray.errors import EngineError


class PageAllocator:
    """Hands out pages, a consecutive run where there is one: attention over such a run needs no gather."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.ones(num_pages, dtype=bool)
        self.num_free = num_pages

    def allocate(self, count: int) -> list[int]:
        """`count` free pages; EngineError when there are fewer (the scheduler asks `num_free` first)."""
        if count > self.num_free:
            raise EngineError(f"{count} KV pages asked for and {self.num_free} of {self.num_pages} free")
        start = self._first_run(count)
        pages = np.arange(start, start + count) if start is not None else np.flatnonzero(self._free)[:count]
        self._free[pages] = False
        self.num_free -= count
        return pages.tolist()

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Giving back a free page is an error: somebody else may own it by now."""
        index = np.asarray(pages, dtype=np.int64)
        if self._free[index].any():
            raise EngineError(f"pages freed twice: {index[self._free[index]].tolist()}")
        self._free[index] = True
        self.num_free += len(index)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Every page is free or owned exactly once; EngineError otherwise."""
        owners = np.zeros(self.num_pages, dtype=np.int64)
        for pages in owned:
            np.add.at(owners, np.asarray(pages, dtype=np.int64), 1)
        wrong = np.flatnonzero(owners + self._free != 1)
        if wrong.size:
            raise EngineError(f"KV pages lost or owned twice: {wrong[:10].tolist()}")
        if self.num_free != int(self._free.sum()):
            raise EngineError(f"{self.num_free} KV pages counted as free, {int(self._free.sum())} are")

    def _first_run(self, count: int) -> int | None:
        """Start of the lowest run of `count` free pages, or None."""
        if count == 0:
            return 0
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free, [False])).astype(np.int8)))
        starts, ends = edges[::2], edges[1::2]
        fits = np.flatnonzero(ends - starts >= count)
        return int(starts[fits[0]]) if fits.size else None


class KVCache:
    """Keys and values of every layer of one model.

    data: `[layers, 2, slots, kv_heads, head_dim]`; keys at index 0, values at 1, rotary already applied.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = torch.empty(layers, 2, slots, kv_heads, head_dim, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys`, `values` `[n, kv_heads, head_dim]` at `slots` `[n]`."""
        self.data[layer, 0].index_copy_(0, slots, keys)
        self.data[layer, 1].index_copy_(0, slots, values)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` `[n]` to `target` `[n]` in every layer at once; all are read before any is written."""
        self.data.index_copy_(2, target, self.data.index_select(2, source))

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers, keys and values."""
        return layers * 2 * kv_heads * head_dim * dtype.itemsize


def slots_of(tables: Tensor, index: Tensor, page_size: int) -> Tensor:
    """Slots of tokens by their index in the request.

    tables: `[B, P]` int64 page numbers; index: `[B, n]` int64 token indices -> `[B, n]` int64 slots.
    """
    pages = tables.gather(1, torch.div(index, page_size, rounding_mode="floor"))
    return pages * page_size + index % page_size
