"""Trees of single requests as plain values, changed and put back into a batch. It does not say how wide they are.

For requests whose candidates depend on more than a drafter's scores; all others keep what `pack` made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree


@dataclass(frozen=True)
class Nodes:
    """Candidates of one request as plain values, heaviest first, so parents before their children.

    parents: index among these, -1 is the root. masses: prefix masses, non-increasing.
    """

    tokens: list[int]
    parents: list[int]
    masses: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: list[int]) -> Nodes:
        """Tokens that are certain, one behind the other."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), [1.0] * len(tokens))


def heaviest(nodes: Nodes, most: int) -> Nodes:
    """The heaviest `most` nodes, heaviest first; the order among equals stays, so parents come first.

    Parents come before their children in `nodes`, and are no lighter.
    """
    order = sorted(range(len(nodes)), key=lambda i: -nodes.masses[i])[:most]
    place = {-1: -1, **{old: new for new, old in enumerate(order)}}
    return Nodes(
        [nodes.tokens[i] for i in order],
        [place[nodes.parents[i]] for i in order],
        [nodes.masses[i] for i in order],
    )


def trunk(nodes: Nodes) -> Nodes:
    """The likeliest path of a tree: its root's heaviest child, that one's, and so on."""
    path: list[int] = []
    for index, parent in enumerate(nodes.parents):
        # Heaviest first, parents first: whoever is the first child of the path's end comes behind it.
        if parent == (path[-1] if path else -1):
            path.append(index)
    masses = [nodes.masses[index] for index in path]
    return Nodes([nodes.tokens[index] for index in path], list(range(-1, len(path) - 1)), masses)


def graft(nodes: Nodes, certain: list[int]) -> Nodes:
    """A tree whose first tokens are known: `certain` at the root with mass 1, and what `nodes` has along and behind it.

    What lies beside a certain token stays too, at its own mass: it can only be wrong.
    """
    chain = Nodes.chain(certain)
    tokens, parents, masses = list(chain.tokens), list(chain.parents), list(chain.masses)
    known = {(parent, token): place for place, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    moved: list[int] = []
    for token, parent, mass in zip(nodes.tokens, nodes.parents, nodes.masses, strict=True):
        above = -1 if parent < 0 else moved[parent]
        if (above, token) not in known:
            known[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
            # Its share of its parent's mass is as it was.
            share = mass / nodes.masses[parent] if parent >= 0 and nodes.masses[parent] else mass
            masses.append(share * masses[above] if above >= 0 else share)
        moved.append(known[above, token])
    return heaviest(Nodes(tokens, parents, masses), len(tokens))


def replace(tree: CandidateTree, others: Mapping[int, Nodes]) -> CandidateTree:
    """The trees of some requests exchanged for others. others: request's index -> its candidates, possibly none."""
    if not others:
        return tree
    device = tree.tokens.device
    widest = max(tree.max_nodes, max(len(nodes) for nodes in others.values()))
    more = (0, widest - tree.max_nodes)
    at = torch.tensor(list(others), device=device)
    depths = {b: _depths(nodes) for b, nodes in others.items()}

    def put(values: Tensor, rows: list[list[int]] | list[list[float]], filler: float) -> Tensor:
        padded = [[*row, *[filler] * (widest - len(row))] for row in rows]
        return pad(values, more, value=filler).index_copy(
            0, at, torch.tensor(padded, dtype=values.dtype, device=device)
        )

    return CandidateTree(
        tokens=put(tree.tokens, [nodes.tokens for nodes in others.values()], 0),
        parents=put(tree.parents, [nodes.parents for nodes in others.values()], -1),
        depths=put(tree.depths, list(depths.values()), 0),
        masses=put(tree.masses, [nodes.masses for nodes in others.values()], 0.0),
        counts=tree.counts.index_copy(0, at, torch.tensor([len(nodes) for nodes in others.values()], device=device)),
        max_depth=max(tree.max_depth, max(max(found, default=0) for found in depths.values())),
    )


def set_aside(
    requests: Tensor, tree: CandidateTree, widths: Tensor, accepted: Accepted
) -> tuple[CandidateTree, Tensor, Accepted]:
    """Tree, widths and path as if some requests had had no candidates, for those who learn from the others.

    requests: `[B]` bool, those to be set aside.
    """
    aside = requests[:, None]
    bare = CandidateTree(
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.masses.masked_fill(aside, 0.0),
        tree.counts.masked_fill(requests, 0),
        max_depth=tree.max_depth,
    )
    path, lengths = accepted.path.masked_fill(aside, 0), accepted.lengths.masked_fill(requests, 1)
    return bare, widths.masked_fill(requests, 0), Accepted(path, lengths, accepted.tokens)


def read(tree: CandidateTree, requests: list[int]) -> dict[int, Nodes]:
    """The trees of some requests as plain values. Waits for the device."""
    if not requests:
        return {}
    at = torch.tensor(requests, device=tree.tokens.device)
    plain = torch.stack([tree.tokens[at].double(), tree.parents[at].double(), tree.masses[at].double()], dim=1)
    counts: list[int] = tree.counts[at].tolist()
    found = {}
    for b, count, (tokens, parents, masses) in zip(requests, counts, plain.tolist(), strict=True):
        found[b] = Nodes([int(t) for t in tokens[:count]], [int(p) for p in parents[:count]], masses[:count])
    return found


def _depths(nodes: Nodes) -> list[int]:
    depths: list[int] = []
    for parent in nodes.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
