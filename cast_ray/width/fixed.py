"""Widths that are given, not chosen: `ar`, `chain` and `fixed:N`."""

from __future__ import annotations

from torch import Tensor

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.shape import RoundShape, RoundTimes


class FixedWidth:
    """The same number of nodes in every round: none (`ar`), the chain's, or N."""

    def __init__(self, name: str, nodes: int, branching: bool) -> None:
        self.name = name
        self.max_nodes = nodes
        self.branching = branching

    def drafts(self, shape: RoundShape) -> bool:
        return self.max_nodes > 0

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        return tree.counts.clamp(max=self.max_nodes)

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        """Nothing to learn: the width is given."""

    def timed(self, times: RoundTimes) -> None:
        """Nothing to learn: the width is given."""

    def report(self) -> dict[str, object]:
        return {"width": self.name, "max_nodes": self.max_nodes}
