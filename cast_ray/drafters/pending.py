"""Features that wait to enter a drafter's context: rounds that do not draft only copy theirs here.

Bounded, and filled in place, so that a plain round pays for its own rows and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PendingRows:
    """Rows of features `[capacity, width]` with their KV slot and position, in the order in which they came."""

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.count = 0
        self._features = torch.empty(capacity, width, dtype=dtype, device=device)
        self._slots = torch.empty(capacity, dtype=torch.int64, device=device)
        self._positions = torch.empty(capacity, dtype=torch.int64, device=device)
        self._has_gaps = False

    def has_room(self, rows: int) -> bool:
        """Whether so many more rows can wait."""
        return self.count + rows <= self.capacity

    def add(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Append rows `[n, width]`, `[n]`, `[n]`, for which there is room."""
        end = self.count + features.shape[0]
        self._features[self.count : end] = features
        self._slots[self.count : end] = slots
        self._positions[self.count : end] = positions
        self.count = end

    def forget(self, pages: Tensor, page_size: int) -> None:
        """Drop the rows that lie on these pages."""
        if self.count:
            slots = self._slots[: self.count]
            slots[torch.isin(torch.div(slots, page_size, rounding_mode="floor"), pages)] = -1
            self._has_gaps = True

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """All rows that still count: features, slots, positions. Valid until the next `add`."""
        rows = self._features[: self.count], self._slots[: self.count], self._positions[: self.count]
        if self._has_gaps:
            kept = rows[1] >= 0
            rows = rows[0][kept], rows[1][kept], rows[2][kept]
        self.count, self._has_gaps = 0, False
        return rows
