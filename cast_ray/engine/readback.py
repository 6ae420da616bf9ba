"""What the host must know of a round, read from the device in one copy: the one wait for the target."""

from __future__ import annotations

import torch
from torch import Tensor


def read_back(**parts: Tensor) -> dict[str, Tensor]:
    """Tensors of a batch, `[B]` or `[B, k]`, on the host under the same names. Whole numbers and truth values come back
    as int64, others as float32."""
    columns = [_bits(part if part.ndim == 2 else part[:, None]) for part in parts.values()]
    read = torch.cat(columns, dim=1).cpu().split([column.shape[1] for column in columns], dim=1)
    found = {}
    for (name, part), values in zip(parts.items(), read, strict=True):
        plain = values.to(torch.int32).view(torch.float32) if part.is_floating_point() else values
        found[name] = plain if part.ndim == 2 else plain[:, 0]
    return found


def _bits(part: Tensor) -> Tensor:
    """Whole numbers that hold the same, int64."""
    return part.float().view(torch.int32).long() if part.is_floating_point() else part.long()
