"""`round`: a budget for each request from this round's masses, by CaDDTree's convex cost and stop rule.

The published baseline that `joint` is held against: it believes the drafter's masses and the measured table, and knows
of other requests only how many they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.cost import CONTEXT_BUCKET
from cast_ray.width.curve import Array
from cast_ray.width.latency import LatencyTable
from cast_ray.width.shape import RoundShape, RoundTimes


class RoundWidth:
    """The first N of each request at which the next node no longer raises R(N) / L(N), L fitted convex.

    With R concave and L convex the ratio has one maximum, and the first node that does not improve it stands behind
    it. On a real curve, with steps, that need not be so: then it stops at the first step's edge, or runs past one.
    """

    name = "round"
    branching = True

    def __init__(self, max_nodes: int, latency: LatencyTable) -> None:
        self.max_nodes = max_nodes
        self._latency = latency
        self._fitted: dict[tuple[int, int], Tensor] = {}

    def drafts(self, shape: RoundShape) -> bool:
        return True

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        cost = self._cost(shape).to(tree.masses.device)[: tree.max_nodes + 1]
        lengths = torch.nn.functional.pad(1.0 + tree.masses.double().cumsum(dim=1), (1, 0), value=1.0)
        rates = lengths / cost
        improves = rates[:, 1:] > rates[:, :-1]
        return torch.minimum(improves.long().cumprod(dim=1).sum(dim=1), tree.counts)

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        """The masses are believed."""

    def timed(self, times: RoundTimes) -> None:
        """So is the table."""

    def report(self) -> dict[str, object]:
        return {"width": self.name}

    def _cost(self, shape: RoundShape) -> Tensor:
        """L(0..max_nodes) in ms of a round in which every request verifies as many, [N+1] float64, convex."""
        key = (shape.batch, int(shape.mean_context) // CONTEXT_BUCKET)
        known = self._fitted.get(key)
        if known is None:
            nodes = np.arange(self.max_nodes + 1)
            middle = (key[1] + 0.5) * CONTEXT_BUCKET
            measured = self._latency.round_ms(nodes, shape.batch, middle, drafting=True)
            known = self._fitted[key] = torch.from_numpy(convex_fit(nodes.astype(np.float64), measured))
        return known


def convex_fit(places: Array, values: Array, knots: int = 32) -> Array:
    """The convex, non-decreasing curve nearest to `values` at `places` by least squares, [n] float64.

    A constant plus hinges `max(0, x - knot)` with weights >= 0: every such sum is convex, and with a knot at each place
    every convex curve is one. `knots` of them, spread evenly, are enough for some hundred places.
    """
    # Imported here: it takes a good part of a second, and no other rule needs it.
    from scipy.optimize import nnls

    chosen = np.unique(np.linspace(0, len(places) - 1, min(knots, len(places))).astype(int))
    hinges = np.maximum(places[:, None] - places[chosen][None, :], 0.0)
    basis = np.concatenate([np.ones((len(places), 1)), hinges[:, :-1]], axis=1)
    return basis @ nnls(basis, values)[0]
