"""The training loss over a frozen output head, and what the blocks would have had accepted.

Loss and gradient are made in one pass over slices of the rows, so the logits of all rows never exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Logits of this many bytes at a time: a slice should stay in the cache of a CPU, and keep a GPU busy.
SLICE_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class Targets:
    """What each row should say, as a sparse distribution over the draft vocabulary.

    ids: `[n, k]` int64; probs: `[n, k]` float32, summing to at most 1, 0 where there is no such token; labels: `[n]`
    int64, the token that came, -1 where it is outside the draft vocabulary; weights: `[n]` float32, 0 where none came.
    """

    ids: Tensor
    probs: Tensor
    labels: Tensor
    weights: Tensor


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Targets, top: int) -> tuple[Tensor, Tensor, Tensor]:
        step = max(1, SLICE_BYTES.get(hidden.device.type, 64 << 20) // (4 * head.shape[0]))
        gradient = torch.empty_like(hidden)
        loss = hidden.new_zeros((), dtype=torch.float32)
        best = targets.labels.new_empty(hidden.shape[0], top)
        correct_mass = torch.empty_like(targets.weights)
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            ids, probs, weights = targets.ids[rows], targets.probs[rows], targets.weights[rows]
            logits = (hidden[rows] @ head.T).float()
            best[rows] = logits.argmax(dim=-1, keepdim=True) if top == 1 else logits.topk(top, dim=-1).indices
            normaliser = logits.logsumexp(dim=-1)
            mass = probs.sum(dim=-1)
            loss += (weights * (mass * normaliser - (probs * logits.gather(1, ids)).sum(dim=-1))).sum()
            labels = targets.labels[rows].clamp(min=0)
            correct_mass[rows] = (logits.gather(1, labels[:, None])[:, 0] - normaliser).exp()
            # d loss / d logits = weight * (mass * softmax - target)
            slope = logits.sub_(normaliser[:, None]).exp_().mul_((weights * mass)[:, None])
            slope.scatter_add_(1, ids, -weights[:, None] * probs)
            gradient[rows] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best, correct_mass)
        return loss, best, correct_mass

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype), None, None, None


def frozen_head_loss(hidden: Tensor, head: Tensor, targets: Targets, top: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of softmax(hidden @ head.T) with the targets, summed by weight.

    hidden: `[n, H]`; head: `[V, H]`, gets no gradient -> the loss; the `top` best tokens, best first, `[n, top]` int64;
    the probability given to the label, `[n]` float32, without meaning where the label is -1.
    """
    return _FrozenHeadLoss.apply(hidden, head, targets, top)


def mix_targets(labels: Tensor, soft_ids: Tensor, soft_probs: Tensor, soft_weight: float, weights: Tensor) -> Targets:
    """The token that came, beside the target's own distribution.

    labels: `[n]` int64, -1 outside the draft vocabulary; soft_ids, soft_probs: `[n, k]`, ids -1 outside it. The soft
    part is renormalised over what is inside; a row where nothing is inside teaches nothing.
    """
    inside = soft_ids >= 0
    soft = torch.where(inside, soft_probs, 0.0)
    total = soft.sum(dim=-1, keepdim=True)
    soft = soft / total.clamp(min=1e-9) * soft_weight * (total > 0)
    hard = (1.0 - soft_weight) * (labels >= 0).float()
    ids = torch.cat([labels[:, None], soft_ids], dim=1).clamp(min=0)
    return Targets(ids, torch.cat([hard[:, None], soft], dim=1), labels, weights)


def depth_weights(depths: int, decay: float, device: torch.device) -> Tensor:
    """`exp(-(d - 1) / decay)` for d = 1..depths, `[depths]` float32."""
    return torch.exp(-torch.arange(depths, device=device) / decay)


def accepted_by_depth(right: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """How often the first d tokens of a block were all right.

    right, real: `[blocks, depths]` bool, the top token was the one that came; a token came at all -> accepted and tried
    blocks `[depths]` float32.
    """
    accepted = (right & real).float().cumprod(dim=1)
    return accepted.sum(dim=0), real.float().sum(dim=0)
