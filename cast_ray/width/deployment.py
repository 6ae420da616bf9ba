"""`deployment`: CAST's own rule, one width for all requests from the mean of calibration rounds and the probe."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.cost import CONTEXT_BUCKET
from cast_ray.width.gain import RoundLengthEstimate
from cast_ray.width.host import accepted_nodes, read_tree
from cast_ray.width.latency import LatencyTable
from cast_ray.width.prior import AcceptanceRecord
from cast_ray.width.reliability import Reliability
from cast_ray.width.shape import RoundShape, RoundTimes

# Request-rounds that `deployment` watches before it settles.
CALIBRATION_ROUNDS = 48
# While it watches it verifies as many candidates as cost at most this much of a forward over one token a request.
CALIBRATION_COST = 1.5


class DeploymentWidth:
    """CAST: one width N* a deployment, the N of 0..max_nodes with the greatest R(N) / L(N). Every N is looked at.

    R is the mean round length of this engine's own rounds; L is the measured latency at the batch and context. The
    first `CALIBRATION_ROUNDS` request-rounds decode at a width whose forward is still cheap; then the widths are set.
    They are set again each time the number of observed rounds has doubled, which mends early luck. Where N* is 0 the
    drafter does not run, and such rounds teach nothing: only drafted rounds (at other batches or contexts) count.
    """

    name = "deployment"
    branching = True

    def __init__(self, max_nodes: int, latency: LatencyTable, record: AcceptanceRecord | None = None) -> None:
        self.max_nodes = max_nodes
        self.estimate = RoundLengthEstimate()
        self.reliability = Reliability(record)
        self._latency = latency
        self._settle_at = CALIBRATION_ROUNDS
        self._round_lengths: np.ndarray | None = None  # R(0..max_nodes) once calibrated
        self._widths: dict[tuple[int, int], int] = {}

    def drafts(self, shape: RoundShape) -> bool:
        return self.width(shape.batch, shape.mean_context) > 0

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        return tree.counts.clamp(max=self.width(shape.batch, shape.mean_context))

    def width(self, batch: int, context: float) -> int:
        """The width in force for a batch and context: a dict lookup once it was worked out."""
        bucket = int(context) // CONTEXT_BUCKET
        known = self._widths.get((batch, bucket))
        if known is None:
            middle = (bucket + 0.5) * CONTEXT_BUCKET
            known = self._calibration_width(batch, middle) if self._round_lengths is None else self._best(batch, middle)
            self._widths[batch, bucket] = known
        return known

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        # What verified nodes taught of masses and depths speaks for nodes that never were; ranks mend the rest.
        read, verified = read_tree(tree, temperatures), widths.cpu().numpy()
        on_path = accepted_nodes(accepted, tree.max_nodes)
        expected = self.reliability.calibrate(read)
        self.estimate.observe(expected, verified, on_path)
        self.reliability.observe(read, expected, verified, on_path)
        if self.estimate.rounds >= self._settle_at:
            self._settle_at = 2 * self.estimate.rounds
            self._round_lengths = self.estimate.mean(self.max_nodes)
            # Worked out anew for what was met so far, so that a report always has the widths in force.
            middle = {bucket: (bucket + 0.5) * CONTEXT_BUCKET for _, bucket in self._widths}
            self._widths = {(batch, bucket): self._best(batch, middle[bucket]) for batch, bucket in self._widths}

    def timed(self, times: RoundTimes) -> None:
        """The table is taken at its word."""

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
