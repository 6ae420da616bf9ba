"""Whether a round should draft at all: decided before drafting, from what earlier drafts promised.

It remembers expected masses of past drafts, not of this round's; how many candidates to verify is decided after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cast_ray.trees.merge import Offer
from cast_ray.width.cost import RoundCost
from cast_ray.width.curve import Array
from cast_ray.width.merge import best_rate, merge
from cast_ray.width.recent import Recent, together
from cast_ray.width.shape import RoundShape, RoundTimes

# Drafts of single requests that there must be to judge by.
ENOUGH = 8
# Remembered rounds that one round's own offer is tried with.
TRIED = 8
# Rounds of a load for which one outlook stands.
STANDS_FOR = 8
# What looking again may cost, as a share of the time of plain rounds.
PROBE_SHARE = 0.01
# The most that one probe is booked at, in plain rounds: a stall in it is not paid back for ever.
DEAREST_PROBE = 20.0


@dataclass
class Outlook:
    """What a load is expected to bring.

    pays: whether drafting does. loss_ms: what a drafted round is expected to lose against a plain one, 0 where it pays.
    rate: tokens per ms of the better of both, prompt chunks left out: they would be read anyway. left: rounds to stand.
    """

    pays: bool
    loss_ms: float
    rate: float
    left: int = STANDS_FOR


class DraftGate:
    """Draft where remembered drafts, run through `merge` at this load's costs, beat a plain round.

    Any load can be judged without having been tried: what a draft promises depends on text and drafter, not on how
    many requests run beside it. So a load that swings costs nothing at its turns. Where drafting does not pay, plain
    rounds save up `PROBE_SHARE` of their time; once that pays for what a draft is expected to lose, one round drafts.
    A probe that shows a gain costs nothing, so that the next one follows at once.

    Where a round has candidates at hand without drafting, drafting must beat verifying just those: what it could add
    is tried out on remembered drafts.
    """

    def __init__(self, cost: RoundCost, max_nodes: int) -> None:
        self._cost = cost
        self._max_nodes = max_nodes
        self._drafts = Recent(max_nodes)
        self._offers = Recent(max_nodes)
        self._outlooks: dict[tuple[int, int, int], Outlook] = {}
        self._saved_ms = 0.0
        self.probing = False
        self.probes = 0

    @property
    def settled(self) -> bool:
        """Whether enough drafts are remembered to judge by."""
        return self._drafts.seen >= ENOUGH

    def drafts(self, shape: RoundShape) -> bool:
        """Whether to draft. `probing` says afterwards that it is to see whether it pays again."""
        self.probing = False
        if not self.settled:
            return True
        outlook = self.outlook(shape)
        outlook.left -= 1
        loss_ms = 0.0 if outlook.pays else outlook.loss_ms
        if shape.offer is not None:
            loss_ms = self._loss_beside(shape, shape.offer, outlook.rate)
        if loss_ms > 0 and self._saved_ms >= loss_ms:
            self.probing = True
            self.probes += 1
            # What it shows counts from the next round on.
            outlook.left = 0
        return loss_ms <= 0 or self.probing

    def outlook(self, shape: RoundShape) -> Outlook:
        """The outlook in force for a load; worked out anew every few rounds of it."""
        key = _load(shape)
        known = self._outlooks.get(key)
        if known is None or known.left <= 0:
            known = self._outlooks[key] = self._look_ahead(shape, known.rate if known else None)
        return known

    def remember(self, masses: Array, counts: NDArray[np.int64]) -> None:
        """Expected masses [B, N] of the drafts of a round, heaviest first, and their numbers of nodes [B]."""
        if not self.settled:
            self._outlooks.clear()
        self._drafts.add(masses, counts)

    def note_offer(self, shape: RoundShape) -> None:
        """What a round had at hand without drafting. Told of every round: those with nothing count as well."""
        if shape.offer is not None:
            self._offers.add(shape.offer.masses, shape.offer.counts, _claims(shape.offer))
        elif self._offers.seen:
            self._offers.add(np.zeros((shape.batch, 1)), np.zeros(shape.batch, dtype=np.int64))

    def account(self, times: RoundTimes, gain: float) -> None:
        """Book a finished round: a plain one saves for probes, a probe is paid for.

        gain: tokens that its candidates were expected to add; expected, for whether they did is luck.
        """
        plain_ms = self._cost.plain_ms(times.shape)
        if not times.drafted:
            # The predicted time: a stall is no reason to probe.
            self._saved_ms += PROBE_SHARE * plain_ms
        elif self.probing:
            loss_ms = times.total_ms - plain_ms - gain / self.outlook(times.shape).rate
            self._saved_ms -= min(max(loss_ms, 0.0), DEAREST_PROBE * plain_ms)

    def _look_ahead(self, shape: RoundShape, last_rate: float | None) -> Outlook:
        bare = RoundShape(shape.contexts)
        plain_rate = rate = shape.batch / self._cost.plain_ms(bare)
        prices, start = np.zeros(shape.batch), last_rate or plain_rate
        claims = None
        if self._offers.seen:
            offered, offers, claims = self._offers.rounds(shape.batch)
            ms = self._cost.offered_ms(bare)
            rate = max(rate, best_rate(offered, offers, prices, ms, committed=shape.batch, start=start))
        if not self._drafts.seen:
            return Outlook(True, 0.0, rate)
        masses, counts, _ = self._drafts.rounds(shape.batch)
        ms = self._cost.drafted_ms(bare)
        rate = max(rate, best_rate(masses, counts, prices, ms, committed=shape.batch, start=start))
        if claims is not None:
            # The latest of both side by side; which of them met is not kept.
            rounds = min(len(masses), len(claims))
            both, nodes = together(masses[:rounds], offered[:rounds], claims[:rounds], self._max_nodes)
            rate = max(rate, best_rate(both, nodes, prices, ms, committed=shape.batch, start=rate))
        choice = merge(masses, counts, prices, self._cost.drafted_ms(shape), rate)
        more_ms = float(choice.ms.mean()) - self._cost.plain_ms(shape)
        loss_ms = more_ms - float(choice.gain.mean()) / rate
        return Outlook(loss_ms < 0, max(loss_ms, 0.0), rate)

    def _loss_beside(self, shape: RoundShape, offer: Offer, rate: float) -> float:
        """ms that drafting is expected to lose against verifying what is at hand alone; below 0 where it gains."""
        prices, counts = np.zeros(shape.batch), offer.counts
        ms = self._cost.offered_ms(shape)
        alone = merge(offer.masses[None], counts[None], prices, ms[: offer.masses.size + 1], rate)
        masses, _, _ = self._drafts.rounds(shape.batch, TRIED)
        both, nodes = together(masses, offer.masses, _claims(offer), self._max_nodes)
        beside = merge(both, nodes, prices, self._cost.drafted_ms(shape)[: both[0].size + 1], rate)
        more_ms = float(beside.ms.mean() - alone.ms[0])
        return more_ms - float(beside.gain.mean() - alone.gain[0]) / rate


def _claims(offer: Offer) -> Array:
    """[B], how much of the next token's probability an offer holds."""
    return (offer.masses * (offer.depths == 1)).sum(axis=1)


def _load(shape: RoundShape) -> tuple[int, int, int]:
    """Loads that share an outlook: batch and context within a quarter of an octave, chunks in steps of 128."""
    return (
        round(4 * math.log2(shape.batch)),
        round(4 * math.log2(shape.mean_context + 64)),
        -(-shape.chunk_tokens // 128),
    )
