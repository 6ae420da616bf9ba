"""From the host to the device without waiting for it.

A plain `torch.tensor(values, device="cuda")` copies pageable memory and waits until all work queued before it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float] | npt.NDArray[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """`values` (numbers, or an array of any shape) as `dtype` on `device`; queued behind what runs there, waited for by
    nobody."""
    numbers = torch.from_numpy(np.asarray(values, dtype=_NUMPY[dtype]))
    if device.type != "cuda":
        return numbers.to(device)
    # PyTorch keeps pinned memory until the copy out of it is done.
    return numbers.pin_memory().to(device, non_blocking=True)


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.bool: np.bool_}
