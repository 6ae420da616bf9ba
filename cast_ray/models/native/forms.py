"""How a weight lies in memory for the compiled kernels, and which form holds a weight's values exactly.

A weight `[out, in]` is cut into *tiles* of 16 outputs, the last one filled up with zeros. In a tile the inputs follow
each other, all 16 outputs of one beside each other, so that a kernel reads memory in one stream. Weights of 4 and 8
bits come in groups of 32 inputs with a scale (and, of 4 bits, a least value) for each output in front:
value = scale * code + least. These are the Q4_0, Q4_1 and Q8_0 of GGUF files, found again in the float32 values that
they stand for: nothing is rounded here, a weight that does not fit exactly is kept as it is.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

TILE = 16
GROUP = 32


class Form(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FOUR_BITS = 2
    EIGHT_BITS = 3

    @property
    def step(self) -> int:
        """Inputs that a kernel takes at a time."""
        return GROUP if self >= Form.FOUR_BITS else 1

    @property
    def step_bytes(self) -> int:
        """Bytes of a tile's step."""
        return {0: 4 * TILE, 1: 2 * TILE, 2: TILE * (4 + GROUP // 2), 3: TILE * (2 + GROUP)}[self]


def pack(weight: Tensor) -> tuple[Form, Tensor]:
    """The smallest form that holds a weight `[out, in]` exactly, and its bytes `[tiles, steps, step_bytes]`, uint8."""
    weight = weight.detach()
    if weight.dtype == torch.bfloat16:
        return Form.BFLOAT16, _plain(weight)
    weight = weight.float()
    if weight.shape[1] % GROUP == 0:
        groups = weight.view(weight.shape[0], -1, GROUP)
        for find in (_spread, partial(_centred, most=7), partial(_centred, most=127)):
            # A few outputs tell nearly always that a form does not fit.
            if _holds(groups[:8], *find(groups[:8])) and _holds(groups, *(found := find(groups))):
                bits = Form.EIGHT_BITS if found[2] is None else Form.FOUR_BITS
                return bits, _grouped(bits, *found)
    rounded = weight.bfloat16()
    if torch.equal(rounded.float(), weight):
        return Form.BFLOAT16, _plain(rounded)
    return Form.FLOAT32, _plain(weight)


def _spread(groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q4_1: codes 0 to 15 from a group's least value to its greatest."""
    least, greatest = groups.aminmax(dim=-1)
    scale, start = ((greatest - least) / 15).half(), least.half()
    return _codes(groups - start.float()[..., None], scale, 0, 15), scale, start


def _centred(groups: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q8_0: codes around 0, the one farthest out is +-127. Q4_0: the farthest is -8, and codes are counted from it."""
    far = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scale = (far / -8).half() if most == 7 else (far.abs() / most).half()
    codes = _codes(groups, scale, -most - 1, most)
    return (codes + 8, scale, -8 * scale) if most == 7 else (codes, scale, None)


def _codes(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    divisor = torch.where(scale == 0, 1, scale.float())[..., None]
    return (values / divisor).round().clamp(least, most)


def _holds(groups: Tensor, codes: Tensor, scale: Tensor, least: Tensor | None) -> bool:
    values = codes * scale.float()[..., None]
    if least is not None:
        values = values + least.float()[..., None]
    return torch.equal(values, groups)


def _tiles(rows: Tensor) -> Tensor:
    """`[out, ...]` -> `[tiles, 16, ...]`, zeros where there is no output; tiles come in pairs."""
    lacking = -rows.shape[0] % (2 * TILE)
    if lacking:
        rows = torch.cat([rows, rows.new_zeros(lacking, *rows.shape[1:])])
    return rows.view(-1, TILE, *rows.shape[1:])


def _plain(weight: Tensor) -> Tensor:
    return _tiles(weight).transpose(1, 2).contiguous().view(torch.uint8)


def _grouped(form: Form, codes: Tensor, scale: Tensor, least: Tensor | None) -> Tensor:
    parts = [_tiles(scale).transpose(1, 2).contiguous().view(torch.uint8)]
    if least is not None:
        parts.append(_tiles(least).transpose(1, 2).contiguous().view(torch.uint8))
    laid = _tiles(codes).permute(0, 2, 3, 1)  # [tiles, groups, 32, 16]
    if form is Form.FOUR_BITS:
        low, high = laid.to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
        laid = low | (high << 4)
    else:
        laid = laid.to(torch.int8).contiguous().view(torch.uint8)
    return torch.cat([*parts, laid.flatten(2)], dim=2).contiguous()
