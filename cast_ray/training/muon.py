"""The optimiser: Muon for the matrices of linear layers, AdamW for everything else.

PyTorch's own Muon orthogonalises in bfloat16, which CPUs without such instructions emulate a hundred times slower;
this one computes in what the device is good at. (Jordan et al. 2024; coefficients of Amsel et al. 2025, Polar Express.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cast_ray.models.devices import resolve_dtype

# The first four of their five iterations: singular values end between 0.4 and 1.6, for a fifth less time a step.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)
# AdamW's learning rate as a share of Muon's.
ADAM_SHARE = 0.1


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest matrix of orthogonal rows (or columns), about: singular values end up near 1. float32 in and out."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(resolve_dtype("auto", matrix.device))
    x = x / (x.norm() * 1.02 + 1e-7)
    for a, b, c in _POLAR_EXPRESS:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices; a step is `lr * sqrt(max(1, rows / columns))` in every direction."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5)


def make_optimisers(network: nn.Module, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon over the weights of linear layers, AdamW over the rest."""
    matrices = {id(m.weight): m.weight for m in network.modules() if isinstance(m, nn.Linear)}
    others = [p for p in network.parameters() if id(p) not in matrices]
    return [
        Muon(list(matrices.values()), lr=learning_rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=learning_rate * ADAM_SHARE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
