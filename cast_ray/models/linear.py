"""Linear layers on a CPU for the few rows that a decoding round has: weights packed once, at load, not every time.

Inputs, sums and outputs are float32; weights take the fewest bits that hold them exactly. Where compiled kernels can be
used (`models.native`) those are 4, 8, 16 or 32; with PyTorch alone 16 (half precision, which holds most bfloat16
weights) or 32. Same numbers as the plain layer up to float32 rounding. Other devices, and builds of PyTorch without
these products, keep the plain layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cast_ray.models import native
from cast_ray.models.devices import computes_in_bfloat16

if TYPE_CHECKING:
    from cast_ray.models.native.calls import NativeLinear

# A weight's row may move by this share of its norm when it is rounded to half precision: what a float32 sum of some
# hundred products loses anyway.
ROUNDING = 2.0**-22
# The packed float32 layout is made for about this many rows; it serves fewer and more as well as a layout of their own.
PACKED_ROWS = 4

Product = Callable[[Tensor], Tensor]  # [n, in] -> [n, out], n > 0


class PackedLinear(nn.Module):
    """One or more linear layers of the same input as one product over packed weights.

    weight: the plain weight, kept only where somebody else reads it (an output head); else None.
    native: the layer as compiled kernels read it, None where PyTorch computes it.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool, exact: bool = True
    ) -> None:
        super().__init__()
        self.in_features = weights[0].shape[1]
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.weight = weights[0] if keep and len(weights) == 1 else None
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.form, self._product = _packed(whole.detach().float(), _joined_bias(weights, biases), exact)
        self.native: NativeLinear | None = self._product if native.available() else None  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        shape = (*input.shape[:-1], self.out_features)
        if input.numel() == 0:
            return input.new_empty(shape)
        return self._product(input.reshape(-1, self.in_features)).view(shape)


def pack_linears(model: nn.Module, *, exact: bool = True, keep: nn.Module | None = None) -> int:
    """Replace every plain `nn.Linear` of a CPU model by a PackedLinear, in place. Returns how many.

    The plain weights are let go, but for those of the layer `keep`. exact: False lets weights be rounded to half
    precision, as a drafter's may. Does nothing where `can_pack` says no.
    """
    if not can_pack(model):
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed = PackedLinear([child.weight], [child.bias], keep=child is keep, exact=exact)
                setattr(parent, name, packed)
                count += 1
    return count


def can_pack(model: nn.Module) -> bool:
    """Whether a model is on a CPU, and in a dtype that packed products serve better than the CPU's own.

    They compute in float32, so that a bfloat16 model gains where bfloat16 is emulated, and there only.
    """
    places = {(p.device, p.dtype) for p in model.parameters()}
    if len(places) != 1:
        return False
    device, dtype = places.pop()
    served = dtype == torch.float32 or (dtype == torch.bfloat16 and not computes_in_bfloat16(device))
    return device.type == "cpu" and served and _has_kernels()


def linear_forms(model: nn.Module) -> list[str]:
    """The forms that a model's linear layers have, for what depends on their speed."""
    return sorted(
        {
            module.form if isinstance(module, PackedLinear) else "plain"
            for module in model.modules()
            if isinstance(module, nn.Linear | PackedLinear)
        }
    )


def fits_half(weight: Tensor) -> bool:
    """Whether half precision holds a weight `[out, in]` up to what float32 sums round anyway."""
    lost = (weight.half().float() - weight).norm(dim=1)
    return bool((lost <= ROUNDING * weight.norm(dim=1)).all())


def _packed(weight: Tensor, bias: Tensor | None, exact: bool) -> tuple[str, Product]:
    if native.available():
        from cast_ray.models.native.calls import NativeLinear, form_name

        linear = NativeLinear(weight, bias)
        return form_name(linear), linear
    if not exact or fits_half(weight):
        half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        return "half", lambda rows: torch.ops.quantized.linear_dynamic_fp16(rows, half)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
    return "float32", lambda rows: torch.ops.mkldnn._linear_pointwise(rows, blocked, bias, "none", [], "")


def _joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    parts = [w.new_zeros(w.shape[0]) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
    return torch.cat(parts).float()


@cache
def _has_kernels() -> bool:
    """PyTorch's two are its own, but not public API, and not in every build: a tiny product tells."""
    if native.available():
        return True
    try:
        rows, weight = torch.ones(2, 8), torch.ones(8, 8)
        half = torch.ops.quantized.linear_prepack_fp16(weight, None)
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        outs = [
            torch.ops.quantized.linear_dynamic_fp16(rows, half),
            torch.ops.mkldnn._linear_pointwise(rows, blocked, None, "none", [], ""),
        ]
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return all(bool((out == 8).all()) for out in outs)
