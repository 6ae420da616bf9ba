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
    """Tokens that one request gained beyond the one of every round, by source number of the candidate.

    length: committed path, root included; kept: its tokens that the request kept, which may be fewer where it ends. So
    rounds and these numbers add up to a request's tokens, and a mean round length of 1 says that nothing was gained.
    """
    counts = [0] * len(SOURCES)
    for source in sources[: max(min(length, kept) - 1, 0)]:
        counts[source] += 1
    return counts


def drafter_record(
    tree: CandidateTree,
    widths: Tensor,
    accepted: Accepted,
    temperatures: Tensor | None = None,
    recorded: Tensor | None = None,
) -> Tensor:
    """Of the drafter's own nodes, `[B, 3]` float32: whether any was verified, how many were accepted, and the mass that
    they promised.

    recorded: `[depths, masses]`, accepted over promised by class as the drafter's folder has it. Then `[B, 6]`, with
    the number that it lets expect, its variance, and how many were accepted; 0 for requests that sample.
    """
    promised = tree.masses if tree.origins is None else tree.origins.drafter_masses
    verified = torch.arange(tree.max_nodes, device=widths.device) < widths[:, None]
    own = verified & (promised > 0)
    # Column 0 is the root, which is what a path is padded with.
    hits = pad(own, (1, 0)).gather(1, accepted.path)
    found = [own.any(dim=1).float(), hits.sum(dim=1).float(), (promised * verified).sum(dim=1)]
    if recorded is not None:
        depths, masses = recorded.shape
        place = (-2 * promised.clamp(min=1e-30).log2()).long().clamp(0, masses - 1)
        likely = (promised * recorded[(tree.depths - 1).clamp(0, depths - 1), place]).clamp(max=1.0) * own
        greedy = torch.ones_like(widths) if temperatures is None else temperatures == 0
        expected = likely.sum(dim=1)
        # The number accepted is the depth reached, whose square is the sum of 2 * depth - 1 over the nodes of the path.
        squares = (likely * (2 * tree.depths - 1)).sum(dim=1)
        variance = (squares - expected.square()).clamp(min=0.0)
        found += [part * greedy for part in (expected, variance, found[1])]
    return torch.stack(found, dim=1)
