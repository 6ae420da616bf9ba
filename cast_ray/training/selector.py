"""The loss of DFlash 2's candidate selector: which of a position's candidates follows the token before it.

The candidates are the network's own best, and their probabilities a softmax over them alone, as in drafting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cast_ray.drafters.dflash2 import CandidateSelector
from cast_ray.training.loss import Targets


def selector_loss(
    selector: CandidateSelector,
    hidden: Tensor,
    head: Tensor,
    vocabulary: Tensor,
    previous: Tensor,
    candidates: Tensor,
    targets: Targets,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of the selector's choice with what the targets hold of the candidates.

    hidden: `[n, H]`; head: `[V, H]` of the draft vocabulary, whose tokens are vocabulary `[V]`; previous: `[n]` tokens
    of the target's vocabulary; candidates: `[n, K]` rows of the head -> the loss, summed by weight; the selector's best
    candidate, as a row of the head, `[n]`; its probabilities `[n, K]`.
    """
    unary = torch.einsum("nh,nkh->nk", hidden, head[candidates]).float()
    scores = unary + selector.pair_scores(hidden, previous[:, None], vocabulary[candidates])[:, 0]
    wanted = (candidates[:, :, None] == targets.ids[:, None]).float() @ targets.probs[:, :, None]
    logprobs = scores.log_softmax(dim=-1)
    loss = -(targets.weights[:, None] * wanted[:, :, 0] * logprobs).sum()
    best = candidates.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    return loss, best, logprobs.detach().exp()
