"""What the target said along a verified tree -> the path of it that is committed.

The walk of one round, for a whole batch and without a loop. It does not move KV entries nor end requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.trees.tree import CandidateTree


@dataclass(frozen=True)
class Accepted:
    """The committed path of each request; P = deepest possible path, root included.

    path: [B, P] int64, rows of the verified tree, 0 = the root, i+1 = node i. Ascending in depth and in index; 0 after
        `lengths`.
    lengths: [B] int64, the round length R >= 1: entries of the path, and tokens committed.
    tokens: [B, P] int64, what the target emits after each row of the path, the last being the next root; 0 after
        `lengths`.
    """

    path: Tensor
    lengths: Tensor
    tokens: Tensor


def accept(target_tokens: Tensor, tree: CandidateTree, widths: Tensor, mask: Tensor) -> Accepted:
    """Step from the root to the child that carries the target's own token, for as long as there is one.

    target_tokens: [B, W+1] int64, the token that the target emits after the root (column 0) and after node i (i+1).
    tree: sliced to the W nodes that were verified; siblings carry distinct tokens, as `pack` gives them.
    widths: [B] int64, how many nodes of each request were verified, at most W.
    mask: [B, W+1, W+1] bool, from `ancestor_mask(tree, W)`.
    """
    nodes = torch.arange(tree.max_nodes, device=target_tokens.device)
    verified = nodes < torch.minimum(widths, tree.counts).unsqueeze(1)
    agrees = verified & (tree.tokens == target_tokens.gather(1, tree.parents + 1))
    agrees = torch.nn.functional.pad(agrees, (1, 0), value=True)
    # Accepted: the node and all its ancestors agree. Siblings are distinct, so what is accepted is one chain, and
    # a node's place on it is its depth.
    accepted = ~(mask & ~agrees.unsqueeze(1)).any(dim=2)
    lengths = accepted.sum(dim=1)

    entries = tree.max_depth + 1
    depths = torch.nn.functional.pad(tree.depths, (1, 0))
    places = depths.masked_fill(~accepted, entries)
    rows = torch.arange(tree.max_nodes + 1, device=target_tokens.device).expand_as(places)
    path = torch.zeros(tree.batch, entries + 1, dtype=torch.int64, device=target_tokens.device)
    path = path.scatter_(1, places, rows)[:, :entries]
    after = torch.arange(entries, device=target_tokens.device) >= lengths.unsqueeze(1)
    return Accepted(path=path, lengths=lengths, tokens=target_tokens.gather(1, path).masked_fill_(after, 0))
