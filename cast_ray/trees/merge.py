"""Candidates of several sources as one tree: equal prefixes are one node, and no family outweighs its parent.

Where the candidates come from is their drafter's business; here they are tokens, parents and masses. Arithmetic on
arrays of the host, for a whole batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cast_ray.trees.tree import CandidateTree, Origins

Whole = NDArray[np.int64]
Array = NDArray[np.float64]

# Source number of what the block drafter proposed; others are above.
DRAFTER = 0
# A factor for the token at each depth, from a fixed seed: a sum of tokens times factors stands for a prefix.
_FACTORS = np.random.default_rng(7).integers(1 << 62, size=1024, dtype=np.int64).view(np.uint64) * np.uint64(2) + (
    np.uint64(1)
)
_REQUEST = np.uint64(0x9E3779B97F4A7C15)
# A child is this much lighter than its parent in logarithms at least, so that rounding never puts it first.
_STEP = 1e-9


@dataclass(frozen=True)
class Offer:
    """Candidate trees of a batch on the host, heaviest first; what lies behind `counts` is padding as in CandidateTree.

    tokens, parents, depths, sources: [B, N] int64. masses: [B, N] float64. counts: [B] int64.
    """

    tokens: Whole
    parents: Whole
    depths: Whole
    masses: Array
    sources: Whole
    counts: Whole

    @property
    def max_depth(self) -> int:
        """Of the deepest node."""
        return int(self.depths.max(initial=0))

    def to_tree(self, device: torch.device) -> CandidateTree:
        """As the tree of a round in which no block drafter ran."""
        none = np.zeros(self.masses.shape, dtype=np.float32)
        return _tree(self, none, device)


def merge(drafted: CandidateTree, offer: Offer, max_nodes: int) -> CandidateTree:
    """One tree of a block drafter's and another source's, of at most `max_nodes` nodes a request.

    What is offered is taken at its word: behind a prefix that both have, the offered tokens get their own share `s` of
    its mass each, and the drafter's what is left, a token that both have from both: `s + (1 - sum of s) * q`. So a
    node never outweighs its parent, nor siblings together theirs, whatever the two say.
    """
    device, batch = drafted.tokens.device, drafted.batch
    read = _read(drafted)
    reach = max(offer.max_depth, drafted.max_depth)
    sides = (read, offer)
    # Every node of both sides in one line, the drafter's first, each with a number that stands for its prefix.
    real = [np.arange(side.tokens.shape[1]) < side.counts[:, None] for side in sides]
    request = np.concatenate([mask.nonzero()[0] for mask in real])
    prefixes = [_prefixes(side) for side in sides]
    keys = np.concatenate([prefix[mask] for prefix, mask in zip(prefixes, real, strict=True)])
    _, first, node = np.unique(keys, return_index=True, return_inverse=True)
    count, split = len(first), int(real[DRAFTER].sum())

    def line(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(side, name)[mask] for side, mask in zip(sides, real, strict=True)])

    # The parent of each as a place in that line, then as a node; the roots lie behind the nodes.
    places = [np.zeros(mask.shape, dtype=np.int64) for mask in real]
    places[0][real[0]] = np.arange(split)
    places[1][real[1]] = np.arange(split, len(keys))
    above = [
        np.take_along_axis(place, np.maximum(side.parents, 0), 1) for place, side in zip(places, sides, strict=True)
    ]
    up = np.concatenate([a[mask] for a, mask in zip(above, real, strict=True)])
    at_root = line("parents") < 0
    parent_line = np.where(at_root, count + request, node[up])
    parent = parent_line[first]

    masses = line("masses").astype(np.float64)
    edges = masses / np.where(at_root, 1.0, np.maximum(masses[up], 1e-30))
    own, said = np.zeros(count), np.zeros(count)
    own[node[:split]], said[node[split:]] = edges[:split], edges[split:]
    claimed = np.minimum(np.bincount(parent, said, count + batch), 1.0)
    share = np.minimum(said + (1.0 - claimed[parent]) * own, 1.0)
    families = np.bincount(parent, share, count + batch)
    share /= np.maximum(families, 1.0)[parent]
    logs = np.append(np.log(np.maximum(share, 1e-30)) - _STEP, np.zeros(batch))
    parents = np.append(parent, np.arange(count, count + batch))
    for _ in range(max(reach - 1, 1).bit_length()):
        logs, parents = logs + logs[parents], parents[parents]

    mine = np.zeros(count)
    mine[node[:split]] = masses[:split]
    source = np.full(count, DRAFTER)
    source[node[split:]] = line("sources")[split:]
    merged, kept = heaviest(
        logs[:count], request[first], parent, line("tokens")[first], line("depths")[first], source, batch, max_nodes
    )
    drafter_masses = np.zeros(merged.masses.shape, dtype=np.float32)
    drafter_masses[kept[0]] = mine[kept[1]]
    return _tree(merged, drafter_masses, device)


def heaviest(
    logs: Array, request: Whole, parent: Whole, tokens: Whole, depths: Whole, sources: Whole, batch: int, most: int
) -> tuple[Offer, tuple[tuple[Whole, Whole], Whole]]:
    """The `most` heaviest of each request's nodes as an Offer, heaviest first.

    logs: [n] logarithms of prefix masses, a child's below its parent's. request: [n], whose node. parent: [n], index
    among the n, or n and above for a root. Also where each node went, ((request, place), index among the n).
    """
    order = np.lexsort((-logs, request))
    ordered = request[order]
    place = np.arange(len(order)) - ordered.searchsorted(np.arange(batch))[ordered]
    kept = place < most
    order, ordered, place = order[kept], ordered[kept], place[kept]
    # A root, and so what is no node, is -1.
    went = np.full(len(logs) + batch, -1)
    went[order] = place
    at = (ordered, place)
    counts = np.bincount(ordered, minlength=batch)
    width = int(counts.max(initial=0))

    def spread(values: NDArray[Any], filler: float) -> NDArray[Any]:
        out = np.full((batch, width), filler, dtype=values.dtype)
        out[at] = values
        return out

    offer = Offer(
        tokens=spread(tokens[order], 0),
        parents=spread(went[parent[order]], -1),
        depths=spread(depths[order], 0),
        masses=np.minimum.accumulate(spread(np.exp(logs[order]), 0.0), axis=1),
        sources=spread(sources[order], DRAFTER),
        counts=counts,
    )
    return offer, (at, order)


def chain_of(tree: CandidateTree) -> CandidateTree:
    """The likeliest child at each depth, from the root on; the rest of the tree is left out. Of any tree."""
    read = _read(tree)
    batch, width = read.tokens.shape
    if not width:
        return tree
    real = np.arange(width) < read.counts[:, None]
    # Heaviest first, so the first of a family is its likeliest.
    families = read.parents + 1 + np.arange(batch)[:, None] * (width + 1)
    taken = np.zeros((batch, width + 1), dtype=bool)
    taken[:, 0] = True
    heirs = np.full(batch * (width + 1), width)
    np.minimum.at(heirs, families[real], np.broadcast_to(np.arange(width), real.shape)[real])
    is_heir = real & (heirs[families] == np.arange(width))
    taken[:, 1:] = is_heir
    up = np.concatenate([np.zeros((batch, 1), dtype=np.int64), read.parents + 1], axis=1)
    for _ in range(max(tree.max_depth, 1).bit_length()):
        taken &= np.take_along_axis(taken, up, 1)
        up = np.take_along_axis(up, up, 1)
    taken = taken[:, 1:]
    place = taken.cumsum(axis=1) - 1
    request, node = taken.nonzero()
    at = (request, place[request, node])
    counts = taken.sum(axis=1)
    length = int(counts.max(initial=0))

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        out = np.zeros((batch, length), dtype=values.dtype)
        out[at] = values[request, node]
        return out

    inside = np.arange(length) < counts[:, None]
    offer = Offer(
        tokens=spread(read.tokens),
        parents=np.where(inside, np.arange(length) - 1, -1),
        depths=np.where(inside, np.arange(length) + 1, 0),
        masses=spread(read.masses),
        sources=spread(read.sources),
        counts=counts,
    )
    own = spread(tree.masses.cpu().numpy() if tree.origins is None else tree.origins.drafter_masses.cpu().numpy())
    return _tree(offer, own, tree.tokens.device)


def _read(tree: CandidateTree) -> Offer:
    """A tree of the device as arrays of the host, in one copy; float32 holds tokens and indices exactly."""
    columns = [tree.tokens, tree.parents, tree.depths, tree.masses, tree.counts[:, None]]
    if tree.origins is not None:
        columns.append(tree.origins.sources)
    read = torch.cat([column.float() for column in columns], dim=1).cpu().numpy()
    n = tree.max_nodes
    whole = read.astype(np.int64)
    sources = whole[:, 4 * n + 1 :] if tree.origins is not None else np.full((tree.batch, n), DRAFTER)
    return Offer(
        tokens=whole[:, :n],
        parents=whole[:, n : 2 * n],
        depths=whole[:, 2 * n : 3 * n],
        masses=read[:, 3 * n : 4 * n].astype(np.float64),
        sources=sources,
        counts=whole[:, 4 * n],
    )


def _prefixes(side: Offer) -> NDArray[np.uint64]:
    """[B, N] uint64, equal for equal prefixes of one request (and by chance once in 2**64 for others)."""
    batch, width = side.tokens.shape
    sums = np.zeros((batch, width + 1), dtype=np.uint64)
    sums[:, 1:] = (side.tokens + 1).astype(np.uint64) * _FACTORS[side.depths % len(_FACTORS)]
    up = np.concatenate([np.zeros((batch, 1), dtype=np.int64), side.parents + 1], axis=1)
    for _ in range(max(side.max_depth, 1).bit_length()):
        # The root adds nothing, and is its own parent: what has arrived there stays.
        sums = sums + np.take_along_axis(sums, up, 1)
        up = np.take_along_axis(up, up, 1)
    return sums[:, 1:] + (np.arange(1, batch + 1, dtype=np.uint64) * _REQUEST)[:, None]


def _tree(nodes: Offer, drafter_masses: NDArray[Any], device: torch.device) -> CandidateTree:
    def put(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return CandidateTree(
        tokens=put(nodes.tokens),
        parents=put(nodes.parents),
        depths=put(nodes.depths),
        masses=put(nodes.masses.astype(np.float32)),
        counts=put(nodes.counts),
        max_depth=nodes.max_depth,
        origins=Origins(sources=put(nodes.sources), drafter_masses=put(drafter_masses)),
    )
