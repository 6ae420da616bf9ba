"""Whose candidates were accepted: counted for reports, and for the watch over the drafter. It decides nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cast_ray.drafters import lookup
from cast_ray.trees.accept import Accepted
from cast_ray.trees.merge import DRAFTER
from cast_ray.trees.tree import CandidateTree

# Names of source numbers. A candidate that the drafter proposed too counts as the drafter's, so that the others'
# numbers are what they add. What a grammar foresees, or leaves of the others' candidates, is the grammar's.
SOURCES = ("drafter", *lookup.SOURCES, "grammar")
GRAMMAR = len(SOURCES) - 1


def path_sources(tree: CandidateTree, accepted: Accepted, foreign: Tensor | None) -> Tensor:
    """Source number of each entry of the committed paths `[B, P - 1]` int64, the roots left out; anything after them.

    tree: the verified slice. foreign: `[B]` bool, requests whose candidates a grammar made.
    """
    path = accepted.path[:, 1:]
    if not path.shape[1]:
        return path
    if tree.origins is None:
        sources = torch.full_like(path, DRAFTER)
    else:
        credited = tree.origins.sources.masked_fill(tree.origins.drafter_masses > 0, DRAFTER)
        sources = credited.gather(1, (path - 1).clamp(min=0))
    return sources if foreign is None else sources.masked_fill(foreign[:, None], GRAMMAR)


def count_accepted(sources: list[int], length: int, kept: int) -> list[int]:
    """Accepted candidates of one request by source number. length: committed path, root included; kept: its tokens that
    the request kept, which may be fewer where it ends."""
    counts = [0] * len(SOURCES)
    for source in sources[: min(length - 1, kept)]:
        counts[source] += 1
    return counts


def drafter_record(tree: CandidateTree, widths: Tensor, accepted: Accepted) -> Tensor:
    """Of the drafter's own nodes, `[B, 3]` float32: whether any was verified, how many were accepted, and the mass that
    they promised."""
    promised = tree.masses if tree.origins is None else tree.origins.drafter_masses
    verified = torch.arange(tree.max_nodes, device=widths.device) < widths[:, None]
    own = verified & (promised > 0)
    # Column 0 is the root, which is what a path is padded with.
    hits = pad(own, (1, 0)).gather(1, accepted.path)
    return torch.stack([own.any(dim=1).float(), hits.sum(dim=1).float(), (promised * verified).sum(dim=1)], dim=1)
