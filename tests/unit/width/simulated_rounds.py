"""A drafter and a target of known distributions, so that the true R(N) is known too."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from cast_ray.trees.accept import Accepted, accept
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree, ancestor_mask

CANDIDATES = 6


class World:
    """The target draws depth d from `truth[d]`; the drafter says `truth ** sharpness`, above 1 over-confident."""

    def __init__(self, seed: int, sharpness: float, nodes: int, depths: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sharpness, self.nodes, self.depths = sharpness, nodes, depths

    def round(self, batch: int) -> tuple[CandidateTree, Tensor, Tensor]:
        """The packed tree [B, N], true mass of each of its nodes [B, N], and what the target says [B, N+1]."""
        logits = 2.0 * torch.randn(batch, self.depths, CANDIDATES, generator=self.generator)
        truth = logits.softmax(dim=-1)
        ids = torch.arange(CANDIDATES).expand_as(logits).contiguous()
        tree = pack(DraftScores((self.sharpness * logits).log_softmax(dim=-1), ids), self.nodes)

        rows = torch.arange(batch)[:, None]
        own = truth[rows, (tree.depths - 1).clamp(min=0), tree.tokens] * (tree.depths > 0)
        true_mass = torch.ones(batch, self.nodes + 1)
        for node in range(self.nodes):
            parent = tree.parents[:, node] + 1
            true_mass[:, node + 1] = own[:, node] * true_mass.gather(1, parent[:, None])[:, 0]

        drawn = torch.multinomial(truth.flatten(0, 1), 1, generator=self.generator).view(batch, self.depths)
        drawn = torch.nn.functional.pad(drawn, (0, 1), value=CANDIDATES)
        target = drawn.gather(1, torch.nn.functional.pad(tree.depths, (1, 0)))
        return tree, true_mass[:, 1:], target


def verify(tree: CandidateTree, target: Tensor, widths: Tensor) -> Accepted:
    width = int(widths.max())
    return accept(target[:, : width + 1], tree.slice(width), widths, ancestor_mask(tree, width))


@lru_cache
def true_round_lengths(sharpness: float, nodes: int) -> np.ndarray:
    """R(0..nodes) of the trees of such a drafter, from the true masses of many."""
    _, true_mass, _ = World(1, sharpness, nodes).round(20_000)
    return 1.0 + np.concatenate([[0.0], true_mass.mean(dim=0).double().numpy().cumsum()])
