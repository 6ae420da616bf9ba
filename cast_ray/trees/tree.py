"""The candidate tree of one round for a whole batch, and which rows of it see which.

It does not decide what is in a tree (`trees.pack`) nor how much of it is verified (`width.policy`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.errors import ConfigError, describe


@dataclass(frozen=True)
class Origins:
    """Whose the nodes of a tree are, where they are not all a block drafter's.

    sources: [B, N] int64, 0 for the drafter, above for others; a node of both counts as the other's here.
    drafter_masses: [B, N] float32, the mass that the drafter itself gave a node; 0 where it did not propose it.
    """

    sources: Tensor
    drafter_masses: Tensor

    def slice(self, width: int) -> Origins:
        """Of the first `width` nodes."""
        return Origins(self.sources[:, :width], self.drafter_masses[:, :width])


@dataclass(frozen=True)
class CandidateTree:
    """Candidate prefixes below each request's root, heaviest first, so that the first `n` of them are a tree too.

    tokens: [B, N] int64, last token of each prefix.
    parents: [B, N] int64, index among the N nodes, always lower than the node's own; -1 is the root.
    depths: [B, N] int64, 1..max_depth.
    masses: [B, N] float32, prefix mass, non-increasing along N.
    counts: [B] int64, how many of the N are nodes. The rest is padding: token 0, parent -1, depth 0, mass 0.
    max_depth: no node lies deeper. Known without reading the device.
    origins: None where all nodes are one block drafter's.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    masses: Tensor
    counts: Tensor
    max_depth: int
    origins: Origins | None = None

    @property
    def batch(self) -> int:
        """B, the number of requests."""
        return self.tokens.shape[0]

    @property
    def max_nodes(self) -> int:
        """N, the width of the tensors; a request may have fewer nodes, see `counts`."""
        return self.tokens.shape[1]

    def slice(self, width: int) -> CandidateTree:
        """The tree of the `width` heaviest nodes: views of this one. A width above N is N."""
        if width < 0:
            raise ConfigError(describe("width", width, "is no number of nodes", "Use 0 for the root alone"))
        return CandidateTree(
            tokens=self.tokens[:, :width],
            parents=self.parents[:, :width],
            depths=self.depths[:, :width],
            masses=self.masses[:, :width],
            counts=self.counts.clamp(max=width),
            max_depth=min(self.max_depth, width),
            origins=None if self.origins is None else self.origins.slice(width),
        )


def ancestor_mask(tree: CandidateTree, width: int) -> Tensor:
    """Which rows of a verified tree attend to which: [B, W+1, W+1] bool, with W = min(width, N).

    Row and column 0 are the root, i+1 is node i. Row r sees column c if c is r itself, an ancestor of r, or the root.
    A padding row sees itself and the root, so that a softmax over it stays finite.
    """
    tree = tree.slice(width)
    # The root is its own parent here: a walk that has arrived stays there.
    up = torch.nn.functional.pad(tree.parents + 1, (1, 0))
    rows = up.shape[1]
    mask = torch.zeros(tree.batch, rows, rows, dtype=torch.bool, device=up.device)
    mask.scatter_(2, torch.arange(rows, device=up.device).expand(tree.batch, rows).unsqueeze(2), True)
    mask.scatter_(2, up.unsqueeze(2), True)
    # Every step doubles how far up each row sees: what it sees itself, and what the row at the end of that sees.
    for _ in range(max(tree.max_depth - 1, 0).bit_length()):
        mask |= mask.gather(1, up.unsqueeze(2).expand_as(mask))
        up = up.gather(1, up)
    return mask


def no_tree(batch: int, device: torch.device) -> CandidateTree:
    """`batch` trees without a node: what plain autoregressive decoding verifies."""
    nodes = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    masses = torch.zeros(batch, 0, device=device)
    return CandidateTree(nodes, nodes, nodes, masses, torch.zeros(batch, dtype=torch.int64, device=device), max_depth=0)
