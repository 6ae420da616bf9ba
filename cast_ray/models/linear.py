"""Linear layers on a CPU for the few rows that a decoding round has.

For a handful of rows BLAS multiplies `W @ x^T` up to three times faster than `x @ W^T`, the order PyTorch asks for,
since it need not pack the large matrix first. Same numbers up to rounding. Other devices keep PyTorch's own layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Beyond this many rows both orders take the same time.
MAX_ROWS = 8
# The other order must win by this factor to be used: a machine's noise is not to decide how numbers round.
MARGIN = 1.15
TRIAL_ROWS = 4
TRIAL_REPEATS = 15


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that multiplies in the other order for up to MAX_ROWS rows."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if rows > MAX_ROWS:
            return F.linear(input, self.weight, self.bias)
        return few_rows_linear(input.reshape(rows, self.in_features), self.weight, self.bias).view(
            *input.shape[:-1], self.out_features
        )


def few_rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows @ weight^T + bias`: rows `[n, in]`, weight `[out, in]` -> `[n, out]`, contiguous."""
    count = rows.shape[0]
    if count in (1, 3):
        # One row would be a matrix-vector product, three have no kernel of their own: two and four are faster.
        rows = F.pad(rows, (0, 0, 0, 1))
    out = torch.mm(weight, rows.t())[:, :count].t().contiguous()
    return out if bias is None else out.add_(bias)


def speed_up_linears(model: nn.Module) -> int:
    """Turn every plain `nn.Linear` of a float32 CPU model into a FewRowsLinear, in place; the weights stay shared.

    Only where a short trial on the model's largest layer shows that it pays on this machine. Returns how many.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears or not all(_is_plain(linear.weight) for linear in linears):
        return 0
    if not _pays(max(linears, key=lambda linear: linear.weight.numel()).weight):
        return 0
    for linear in linears:
        # The same parameters under another forward: hooks, names and ties of the module stay as they are.
        linear.__class__ = FewRowsLinear
    return len(linears)


def _is_plain(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.inference_mode()
def _pays(weight: Tensor) -> bool:
    rows = torch.randn(TRIAL_ROWS, weight.shape[1])
    ours = _best_of(lambda: few_rows_linear(rows, weight, None))
    theirs = _best_of(lambda: F.linear(rows, weight))
    return theirs > MARGIN * ours


def _best_of(run: Callable[[], Tensor]) -> float:
    best = float("inf")
    for _ in range(TRIAL_REPEATS):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
