"""A round's candidates as arrays of the host: read from the device once, in one copy, for all who look at them.

Choosing is arithmetic on some thousand numbers; on the host that takes less time than launching it elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.curve import Array

Whole = NDArray[np.int64]

# Kinds of nodes: only the drafter's, only another source's, of both.
OF_DRAFTER, OF_OTHERS, OF_BOTH = 0, 1, 2
KINDS = 3


@dataclass(frozen=True)
class HostTree:
    """`CandidateTree` without its tokens: masses [B, N] float64; parents, depths [B, N] and counts [B] int64.

    warmth: [B] temperatures, None when all requests are greedy.
    kinds: [B, N] int64, who proposed a node, one of the three below; None where all are the drafter's alone.
    drafter_masses: [B, N] float64 beside it, what the drafter itself gave each node.
    """

    masses: Array
    parents: Whole
    depths: Whole
    counts: Whole
    warmth: Array | None
    kinds: Whole | None = None
    drafter_masses: Array | None = None

    def of_drafter(self) -> HostTree:
        """The drafter's own tree within it, in the same places; other nodes are no nodes there."""
        if self.drafter_masses is None:
            return self
        depths = np.where(self.drafter_masses > 0, self.depths, 0)
        return HostTree(self.drafter_masses, self.parents, depths, self.counts, self.warmth)


def read_tree(tree: CandidateTree, temperatures: Tensor | None) -> HostTree:
    """One copy of [B, 3N + 2] float32, or 5N + 2, which holds indices of nodes exactly."""
    nodes = tree.max_nodes
    columns = [tree.masses, tree.parents.float(), tree.depths.float(), tree.counts.unsqueeze(1).float()]
    if tree.origins is not None:
        columns += [tree.origins.sources.float(), tree.origins.drafter_masses]
    if temperatures is not None:
        columns.append(temperatures.unsqueeze(1).float())
    read = torch.cat(columns, dim=1).cpu().numpy().astype(np.float64)
    whole = read[:, nodes : 3 * nodes + 1].astype(np.int64)
    kinds = drafter_masses = None
    if tree.origins is not None:
        sources, drafter_masses = np.split(read[:, 3 * nodes + 1 : 5 * nodes + 1], 2, axis=1)
        kinds = np.where(sources > 0, np.where(drafter_masses > 0, OF_BOTH, OF_OTHERS), OF_DRAFTER)
    return HostTree(
        masses=read[:, :nodes],
        parents=whole[:, :nodes],
        depths=whole[:, nodes:-1],
        counts=whole[:, -1],
        warmth=None if temperatures is None else read[:, -1],
        kinds=kinds,
        drafter_masses=drafter_masses,
    )


def accepted_nodes(accepted: Accepted, nodes: int) -> NDArray[np.bool_]:
    """[B, N] bool, the nodes on each request's committed path. One copy of [B, P + 1]."""
    read = torch.cat([accepted.path, accepted.lengths.unsqueeze(1)], dim=1).cpu().numpy()
    path, lengths = read[:, :-1], read[:, -1:]
    # Row 0 of a path is the root; it collects the padding too, and is dropped.
    hits = np.zeros((len(path), nodes + 1), dtype=bool)
    np.put_along_axis(hits, np.where(np.arange(path.shape[1]) < lengths, path, 0), True, axis=1)
    return hits[:, 1:]
