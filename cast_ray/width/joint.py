"""`joint`: one budget for all requests of a round, every total looked at, on costs and masses that rounds keep true.

The parts are elsewhere: what masses are worth (`reliability`), what rounds cost (`cost`), whether to draft (`gate`),
the choice itself (`merge`). Here they meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cast_ray.trees.accept import Accepted
from cast_ray.trees.merge import Offer
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.cost import RoundCost
from cast_ray.width.curve import Array
from cast_ray.width.gate import DraftGate
from cast_ray.width.host import OF_OTHERS, HostTree, accepted_nodes, read_tree
from cast_ray.width.latency import LatencyTable
from cast_ray.width.merge import Choice, merge
from cast_ray.width.prior import AcceptanceRecord
from cast_ray.width.reliability import Reliability
from cast_ray.width.shape import RoundShape, RoundTimes

# While nothing is known of the drafter, where a round drafts only to learn, and in one of so many others, as many
# candidates are verified as cost at most this share of a plain round more, whatever their masses: candidates that
# nobody verifies teach nothing, and what was once misjudged as too light would stay so.
LEARNING_SHARE, LEARN_EVERY = 0.1, 32
# Weight of a round in the running means of the report.
RECENT = 0.1


class JointWidth:
    """The widths that maximise expected tokens minus time at its price, over all requests of a round together.

    The price of a ms is the long-run rate at this load, the fixed point over recent drafts (`gate.Outlook.rate`).
    record: see `Reliability`.
    """

    name = "joint"
    branching = True

    def __init__(self, max_nodes: int, latency: LatencyTable, record: AcceptanceRecord | None = None) -> None:
        self.max_nodes = max_nodes
        self.cost = RoundCost(latency, max_nodes)
        self.reliability = Reliability(record)
        self.gate = DraftGate(self.cost, max_nodes)
        # Of the round under way: read and decided in `choose`, learnt from in `observe` and `timed`.
        self._tree: HostTree | None = None
        self._expected: Array = np.zeros((0, 0))
        self._choice: Choice | None = None
        self._offer: Offer | None = None
        self._rounds = {"drafted": 0, "plain": 0}
        self._recent: dict[int, dict[str, float]] = {}  # by batch

    def drafts(self, shape: RoundShape) -> bool:
        self._offer = self._believed(shape)
        return self.gate.drafts(replace(shape, offer=self._offer))

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        self._tree = read_tree(tree, shape.temperatures)
        masses, counts = self.reliability.calibrate(self._tree), self._tree.counts
        self._expected = masses
        if self._offer is None:  # where there is no drafter nobody asked whether to draft
            self._offer = self._believed(shape)
        if not shape.drafted:
            # At hand without drafting: nothing has to be verified only to be learnt of.
            masses = self._expected = np.minimum(masses, self._tree.masses)
            ms = self.cost.offered_ms(shape)[: masses.size + 1]
            rate = self.gate.outlook(shape).rate
            self._choice = merge(masses[None], counts[None], self.cost.prices(shape), ms, rate)
            return torch.from_numpy(self._choice.widths[0])
        self._remember(self._tree, masses)
        ms, prices = self.cost.drafted_ms(shape)[: masses.size + 1], self.cost.prices(shape)
        rate = self.gate.outlook(shape).rate
        choice = merge(masses[None], counts[None], prices, ms, rate)
        look = self.cost.look()
        if look is not None:
            nodes = int(look * max(1, choice.nodes[0]))
            bound = {"most": nodes} if look < 1 else {"least": nodes}
            choice = merge(masses[None], counts[None], prices, ms, rate, **bound)
        elif self.gate.probing or not self.gate.settled or self._rounds["drafted"] % LEARN_EVERY == 0:
            most_ms = ms[choice.nodes[0]] + LEARNING_SHARE * self.cost.plain_ms(shape)
            least = max(1, int(np.flatnonzero(ms <= most_ms)[-1]))
            choice = merge(masses[None], counts[None], prices, ms, rate, least)
        self._choice = choice
        return torch.from_numpy(self._choice.widths[0])

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        if self._tree is not None:
            on_path = accepted_nodes(accepted, tree.max_nodes)
            self.reliability.observe(self._tree, self._expected, widths.cpu().numpy(), on_path)

    def timed(self, times: RoundTimes) -> None:
        choice = self._choice
        self._choice = self._tree = None
        gain = float(choice.gain[0]) if choice else 0.0
        self._note(times, gain, int(choice.nodes[0]) if choice else 0)
        self.gate.note_offer(replace(times.shape, offer=self._offer))
        self._offer = None
        self.gate.account(times, gain)
        self.cost.observe(times)

    def report(self) -> dict[str, Any]:
        """What was learnt of drafter and device, and by batch what was done lately (running means).

        `chosen`: nodes a request, plain rounds counted as 0; expected and measured tokens and ms of a whole round.
        """
        chosen = [
            {**means, "batch": batch, "context": int(means["context"]), "nodes": round(means["nodes"])}
            for batch, means in sorted(self._recent.items())
        ]
        return {
            "width": self.name,
            "calibrated": self.gate.settled,
            "rounds": dict(self._rounds),
            "probes": self.gate.probes,
            "reliability": self.reliability.report(),
            "latency_correction": self.cost.report(),
            "chosen": chosen,
        }

    def _believed(self, shape: RoundShape) -> Offer | None:
        """The offer with the masses that its like has earned: those that were chosen are those that promised most, and
        so disappoint most."""
        offer = shape.offer
        if offer is None or not offer.masses.size:
            return offer
        warmth = None if shape.temperatures is None else shape.temperatures.cpu().numpy().astype(np.float64)
        kinds = np.full(offer.masses.shape, OF_OTHERS)
        tree = HostTree(offer.masses, offer.parents, offer.depths, offer.counts, warmth, kinds)
        masses = np.minimum(self.reliability.calibrate(tree), offer.masses)
        return replace(offer, masses=np.minimum.accumulate(masses, axis=1))

    def _remember(self, tree: HostTree, masses: Array) -> None:
        """What the drafter alone promised: whether to draft is judged by that."""
        if tree.drafter_masses is None:
            self.gate.remember(masses, tree.counts)
            return
        alone = self.reliability.calibrate(tree.of_drafter())
        self.gate.remember(-np.sort(-alone, axis=1), (tree.drafter_masses > 0).sum(axis=1))

    def _note(self, times: RoundTimes, gain: float, nodes: int) -> None:
        shape = times.shape
        # Rounds of candidates that were at hand are named where there are any.
        kind = "drafted" if times.drafted else "offered" if nodes else "plain"
        self._rounds[kind] = self._rounds.get(kind, 0) + 1
        now = {
            "context": shape.mean_context,
            "nodes": nodes / shape.batch,
            "drafted": float(times.drafted),
            "expected_tokens": shape.batch + gain,
            "committed_tokens": float(times.committed),
            "round_ms": times.total_ms,
        }
        means = self._recent.setdefault(shape.batch, now)
        for name, value in now.items():
            means[name] += RECENT * (value - means[name])
