"""How many candidates each request verifies in a round: one protocol, and the policies by name.

Policies see masses, counts and the latency table, never a model. They change speed, not output.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from cast_ray.config import check_width
from cast_ray.errors import ConfigError, describe
from cast_ray.width.gain import RoundLengthEstimate
from cast_ray.width.latency import LatencyTable

# Request-rounds that `deployment` watches before it settles.
CALIBRATION_ROUNDS = 48
# While it watches it verifies as many candidates as cost at most this much of a forward over one token a request.
CALIBRATION_COST = 1.5
# Contexts within one bucket (tokens) share a width.
CONTEXT_BUCKET = 256


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

    def drafts(self, batch: int, context: float) -> bool:
        """Whether the round of `batch` requests with `context` cached tokens each (mean) should run the drafter."""
        ...

    def choose(self, masses: Tensor, counts: Tensor, batch: int, context: float) -> Tensor:
        """Nodes to verify of each request, [B] int64, at most `counts`.

        masses: [B, N] float32, sorted. counts: [B] int64, nodes that there are.
        """
        ...

    def observe(self, masses: Tensor, widths: Tensor, path: Tensor, lengths: Tensor) -> None:
        """What a drafted round showed, after acceptance; arguments as in `RoundLengthEstimate.observe`."""
        ...

    def report(self) -> dict[str, object]:
        """Plain values for summaries."""
        ...


class FixedWidth:
    """The same number of nodes in every round: `ar` (none), `chain` and `fixed:N`."""

    def __init__(self, name: str, nodes: int, branching: bool) -> None:
        self.name = name
        self.max_nodes = nodes
        self.branching = branching

    def drafts(self, batch: int, context: float) -> bool:
        return self.max_nodes > 0

    def choose(self, masses: Tensor, counts: Tensor, batch: int, context: float) -> Tensor:
        return counts.clamp(max=self.max_nodes)

    def observe(self, masses: Tensor, widths: Tensor, path: Tensor, lengths: Tensor) -> None:
        """Nothing to learn: the width is given."""

    def report(self) -> dict[str, object]:
        return {"width": self.name, "max_nodes": self.max_nodes}


class DeploymentWidth:
    """CAST: one width N* a deployment, the N of 0..max_nodes with the greatest R(N) / L(N). Every N is looked at.

    R is the mean round length of this engine's own rounds; L is the measured latency at the batch and context. The
    first `CALIBRATION_ROUNDS` request-rounds decode at a width whose forward is still cheap; then the widths are set.
    They are set again each time the number of observed rounds has doubled, which mends early luck. Where N* is 0 the
    drafter does not run, and such rounds teach nothing: only drafted rounds (at other batches or contexts) count.
    """

    name = "deployment"
    branching = True

    def __init__(self, max_nodes: int, latency: LatencyTable) -> None:
        self.max_nodes = max_nodes
        self.estimate = RoundLengthEstimate()
        self._latency = latency
        self._settle_at = CALIBRATION_ROUNDS
        self._round_lengths: np.ndarray | None = None  # R(0..max_nodes) once calibrated
        self._widths: dict[tuple[int, int], int] = {}

    def drafts(self, batch: int, context: float) -> bool:
        return self.width(batch, context) > 0

    def choose(self, masses: Tensor, counts: Tensor, batch: int, context: float) -> Tensor:
        return counts.clamp(max=self.width(batch, context))

    def width(self, batch: int, context: float) -> int:
        """The width in force for a batch and context: a dict lookup once it was worked out."""
        bucket = int(context) // CONTEXT_BUCKET
        known = self._widths.get((batch, bucket))
        if known is None:
            middle = (bucket + 0.5) * CONTEXT_BUCKET
            known = self._calibration_width(batch, middle) if self._round_lengths is None else self._best(batch, middle)
            self._widths[batch, bucket] = known
        return known

    def observe(self, masses: Tensor, widths: Tensor, path: Tensor, lengths: Tensor) -> None:
        self.estimate.observe(masses, widths, path, lengths)
        if self.estimate.rounds >= self._settle_at:
            self._settle_at = 2 * self.estimate.rounds
            self._round_lengths = self.estimate.mean(self.max_nodes)
            # Worked out anew for what was met so far, so that a report always has the widths in force.
            middle = {bucket: (bucket + 0.5) * CONTEXT_BUCKET for _, bucket in self._widths}
            self._widths = {(batch, bucket): self._best(batch, middle[bucket]) for batch, bucket in self._widths}

    def report(self) -> dict[str, object]:
        """The state of the estimate, and per batch and context bucket in force the width and its expected rate."""
        chosen = []
        for (batch, bucket), nodes in sorted(self._widths.items()):
            entry: dict[str, object] = {"batch": batch, "context": bucket * CONTEXT_BUCKET, "nodes": nodes}
            if self._round_lengths is not None:
                cost = self._costs((bucket + 0.5) * CONTEXT_BUCKET, batch)[nodes]
                entry["expected_round_length"] = float(self._round_lengths[nodes])
                entry["expected_round_ms"] = float(cost)
            chosen.append(entry)
        calibrated = self._round_lengths is not None
        return {"width": self.name, "calibrated": calibrated, **self.estimate.to_dict(), "chosen": chosen}

    def _calibration_width(self, batch: int, context: float) -> int:
        nodes = np.arange(self.max_nodes + 1)
        cost = self._latency.verify_ms(batch * (nodes + 1), batch, context)
        # At least one: without a single candidate nothing would ever be learnt.
        return max(1, int(np.flatnonzero(cost <= CALIBRATION_COST * cost[0])[-1]))

    def _best(self, batch: int, context: float) -> int:
        # argmax takes the first of equals: the narrower tree.
        return int(np.argmax(self._round_lengths / self._costs(context, batch)))

    def _costs(self, context: float, batch: int) -> np.ndarray:
        """L(0..max_nodes) in ms; without candidates the drafter does not run."""
        plain = self._latency.round_ms([0], batch, context, drafting=False)
        drafted = self._latency.round_ms(np.arange(1, self.max_nodes + 1), batch, context, drafting=True)
        return np.concatenate([plain, drafted])


def needs_latency(spec: str) -> bool:
    """Whether the policy of a `width` setting asks for a latency table, so that measuring one is worth its time."""
    return spec == "deployment"


def make_policy(spec: str, *, block_size: int | None, max_nodes: int, latency: LatencyTable | None) -> WidthPolicy:
    """The policy of a `width` setting.

    block_size: positions of the drafter's block, root included; None without a drafter.
    max_nodes: the widest tree allowed; the chain is cut to it.
    latency: this device's table; `deployment` needs it.
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
    return DeploymentWidth(max_nodes, latency)
