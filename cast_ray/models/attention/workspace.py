"""Memory that FlashInfer's kernels work in, sized by what its scheduler asks for, and the buffers of captured plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cast_ray.errors import EngineError
from cast_ray.models.attention.base import Group

# The scheduler's own numbers (FlashInfer 0.6, attention/scheduler.cuh): query rows of a tile at most, the same with
# heads as wide as WIDE, at least, and tiles in flight on a multiprocessor.
TILE, WIDE_TILE, LEAST_TILE, WIDE, TILES_EACH = 128, 64, 16, 256, 2
# Whatever it allocates is aligned; and plans of a few arrays more must still fit.
SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """The groups that a captured plan can hold: of so many new tokens and requests, and at most so much of each.

    queries: new tokens of a request, padding included.
    """

    rows: int
    requests: int
    pages_each: int
    queries: int

    def check(self, group: Group, page_size: int) -> None:
        """EngineError where a group does not fit."""
        found = Bounds(group.rows, len(group.lengths), pages_of(group, page_size), group.positions.shape[1])
        same = (found.rows, found.requests) == (self.rows, self.requests)
        if not same or found.pages_each > self.pages_each or found.queries > self.queries:
            raise EngineError(f"a captured forward of {self} was given {found}")

    def buffers(self, device: torch.device) -> dict[str, Tensor]:
        """Fixed index buffers by the names of FlashInfer's constructor, int32."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return {
            "qo_indptr_buf": zeros(self.requests + 1),
            "paged_kv_indptr_buf": zeros(self.requests + 1),
            "paged_kv_indices_buf": zeros(self.requests * self.pages_each),
            "paged_kv_last_page_len_buf": zeros(self.requests),
        }

    def starts(self, device: torch.device) -> Tensor:
        """Where each request's mask begins, `[requests + 1]` int32."""
        return torch.zeros(self.requests + 1, dtype=torch.int32, device=device)

    def mask_buffer(self, keys: int, device: torch.device) -> Tensor:
        """Bits of the largest masks, uint8. keys: that a row can see at most."""
        return torch.zeros(-(-self.rows * keys // 8) + self.requests, dtype=torch.uint8, device=device)

    def index_buffer(self, fold: int, device: torch.device) -> Tensor:
        """The scheduler's own index arrays: about fifteen bytes a tile and four a row. fold: query heads a key head."""
        size = 16 * (_tiles(self, fold, LEAST_TILE) + TILES_EACH * multiprocessors(device)) + 8 * self.rows
        return torch.empty(size + SLACK_BYTES // 16, dtype=torch.uint8, device=device)


def pages_of(group: Group, page_size: int) -> int:
    """Pages of the request with the most keys."""
    return -(-max(c + n for c, n in zip(group.contexts, group.lengths, strict=True)) // page_size)


class Workspace:
    """One float buffer for all wrappers of a device: their kernels run one after another.

    It grows when a larger plan comes; those who have the smaller one keep it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, heads: int, kv_heads: int, head_dim: int, bounds: Bounds | None) -> Tensor:
        """A buffer large enough for plans of these heads; bounds: of a captured plan, None for eager ones."""
        size = workspace_bytes(heads, kv_heads, head_dim, multiprocessors(self._device), bounds)
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._room


def workspace_bytes(heads: int, kv_heads: int, head_dim: int, processors: int, bounds: Bounds | None = None) -> int:
    """Bytes for partial outputs and their sums, where the keys of a tile are split over processors.

    An eager plan splits no further than the device has room for tiles; a captured one is laid out for the most tiles
    that its rows and requests can make.
    """
    tile, tiles = _most_rows(head_dim), max(1, TILES_EACH * processors // kv_heads)
    if bounds is not None:
        fold = heads // kv_heads
        # The scheduler picks a tile for the longest request that there could be.
        longest = (bounds.rows - bounds.requests + 1) * fold
        tile = next((size for size in (LEAST_TILE, WIDE_TILE) if longest <= size), _most_rows(head_dim))
        tiles = max(tiles, _tiles(bounds, fold, tile))
    return heads * tiles * tile * (head_dim + 1) * 4 + SLACK_BYTES


def _most_rows(head_dim: int) -> int:
    return TILE if head_dim < WIDE else WIDE_TILE


def _tiles(bounds: Bounds, fold: int, tile: int) -> int:
    return -(-bounds.rows * fold // tile) + bounds.requests - 1


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
