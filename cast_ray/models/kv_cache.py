"""The tensors behind the paged KV pool, and where each token of a request lives in them.

A *page* is `page_size` token places. A *slot* is one token place in the pool, `page * page_size + offset`. Target and
drafter keep their own tensors but share pages and slots, so one block table serves both. Who holds a page is the
business of `models.pages`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer of one model.

    data: `[layers, 2, slots + scratch, kv_heads, head_dim]`; keys at index 0, values at 1, rotary already applied.
    slots: places that requests use. scratch: places behind them, a page where padding of captured forwards writes.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: int = 0,
    ) -> None:
        self.slots = slots
        self.data = torch.empty(layers, 2, slots + scratch, kv_heads, head_dim, dtype=dtype, device=device)
        # Masked, but read: what memory happens to hold may be no number.
        self.data[:, :, slots:].zero_()

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
