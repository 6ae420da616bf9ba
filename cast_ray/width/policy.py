"""How many candidates each request verifies in a round: one protocol, and the policies by name.

Policies see masses, counts and the latency table, never a model. They change speed, not output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from cast_ray.config import check_width
from cast_ray.errors import ConfigError, describe
from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.caddtree import RoundWidth
from cast_ray.width.deployment import DeploymentWidth
from cast_ray.width.fixed import FixedWidth
from cast_ray.width.joint import JointWidth
from cast_ray.width.latency import LatencyTable
from cast_ray.width.prior import AcceptanceRecord
from cast_ray.width.shape import RoundShape, RoundTimes


class WidthPolicy(Protocol):
    """Asked twice a round: whether to draft at all, and then how many of the packed candidates to verify.

    name: the spelling that makes it, such as `fixed:31`.
    max_nodes: the widest tree that it can ask for, a request; 0 never drafts.
    branching: False asks for the chain of the likeliest child at each depth.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_nodes(self) -> int: ...

    @property
    def branching(self) -> bool: ...

    def drafts(self, shape: RoundShape) -> bool:
        """Whether a round of this load should run the drafter."""
        ...

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        """Nodes to verify of each request, [B] int64, at most `tree.counts`; the first of them are a tree.

        On the tree's device, or on the host where they were worked out there.
        """
        ...

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        """What a drafted round showed, after acceptance.

        tree: the whole packed tree, not the verified slice: what lies beyond it tells what a wider one would bring.
        widths: [B] int64, nodes verified. temperatures: [B] float32, None when all requests are greedy.
        """
        ...

    def timed(self, times: RoundTimes) -> None:
        """What a finished round took. Told of every round with decoding requests, drafted or not."""
        ...

    def report(self) -> dict[str, object]:
        """Plain values for summaries."""
        ...


MEASURING: dict[str, Callable[[int, LatencyTable, AcceptanceRecord | None], WidthPolicy]] = {
    "deployment": DeploymentWidth,
    "round": lambda max_nodes, latency, _: RoundWidth(max_nodes, latency),
    "joint": JointWidth,
}


def needs_latency(spec: str) -> bool:
    """Whether the policy of a `width` setting asks for a latency table, so that measuring one is worth its time."""
    return spec in MEASURING


def make_policy(
    spec: str,
    *,
    block_size: int | None,
    max_nodes: int,
    latency: LatencyTable | None,
    record: AcceptanceRecord | None = None,
) -> WidthPolicy:
    """The policy of a `width` setting.

    block_size: positions of the drafter's block, root included; None without a drafter.
    max_nodes: the widest tree allowed; the chain is cut to it.
    latency: this device's table; `deployment`, `round` and `joint` need it.
    record: what the drafter's folder says of its masses; rules that learn them start from it.
    Raises ConfigError when the spec is unknown, out of range, or needs what is missing.
    """
    check_width(spec, max_nodes)
    kind, _, count = spec.partition(":")
    if kind == "ar":
        return FixedWidth("ar", 0, branching=False)
    if block_size is None or block_size < 2:
        remedy = 'Set width="ar" to decode without one, or give a drafter'
        raise ConfigError(describe("width", spec, "needs a drafter that drafts at least one token", remedy))
    if kind == "fixed":
        return FixedWidth(f"fixed:{int(count)}", int(count), branching=True)
    if kind == "chain":
        return FixedWidth("chain", min(block_size - 1, max_nodes), branching=False)
    if latency is None:
        remedy = "Choose a width that needs none, such as fixed:31"
        raise ConfigError(describe("width", spec, "needs this device's latency table", remedy))
    if not latency.draft:
        remedy = "Measure again with the drafter loaded"
        raise ConfigError(describe("width", spec, "needs a latency table that holds the drafter's time", remedy))
    return MEASURING[kind](max_nodes, latency, record)
