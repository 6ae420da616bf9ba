"""What a round did for one request: the tree that was verified, and the path through it. For those who ask to see it.

It costs a few reads of the device and is made only for such requests; a round in which nobody asks pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one request.

    tokens, parents, masses: of every verified node, the heaviest first; a parent of -1 is the root, the last token of
    the round before. accepted: the nodes of the path, by their index. committed: tokens gained, as a rule those of the
    path and one more of the target's own.
    """

    tokens: list[int]
    parents: list[int]
    masses: list[float]
    accepted: list[int]
    committed: list[int]


def trace_rounds(
    rows: Sequence[int],
    tree: CandidateTree,
    widths: Sequence[int],
    accepted: Accepted,
    committed: Sequence[list[int]],
) -> list[RoundTrace]:
    """The traces of the requests in these rows of the batch. widths: nodes verified of each request of the batch."""
    index = torch.tensor(rows, device=tree.tokens.device)
    parts = (tree.tokens, tree.parents, tree.masses, accepted.path, accepted.lengths, tree.counts)
    found = []
    for row, tokens, parents, masses, path, length, count in zip(
        rows, *(part[index].tolist() for part in parts), strict=True
    ):
        nodes = min(widths[row], count)
        taken = [place - 1 for place in path[1:length]]
        found.append(RoundTrace(tokens[:nodes], parents[:nodes], masses[:nodes], taken, committed[row]))
    return found
