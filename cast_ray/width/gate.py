"""Whether a round should draft at all: decided before drafting, from what earlier drafts promised.

It remembers expected masses of past drafts, not of this round's; how many candidates to verify is decided after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cast_ray.width.cost import RoundCost
from cast_ray.width.curve import Array
from cast_ray.width.merge import best_rate, merge
from cast_ray.width.shape import RoundShape, RoundTimes

# Drafts of single requests that are kept; how many a load with fewer requests is judged by; how many there must be.
REMEMBERED, RECENT, ENOUGH = 256, 32, 8
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
    """

    def __init__(self, cost: RoundCost, max_nodes: int) -> None:
        self._cost = cost
        self._masses = np.zeros((REMEMBERED, max_nodes))
        self._counts = np.zeros(REMEMBERED, dtype=np.int64)
        self._seen = 0
        self._outlooks: dict[tuple[int, int, int], Outlook] = {}
        self._saved_ms = 0.0
        self.probing = False
        self.probes = 0

    @property
    def settled(self) -> bool:
        """Whether enough drafts are remembered to judge by."""
        return self._seen >= ENOUGH

    def drafts(self, shape: RoundShape) -> bool:
        """Whether to draft. `probing` says afterwards that it is to see whether it pays again."""
        self.probing = False
        if not self.settled:
            return True
        outlook = self.outlook(shape)
        outlook.left -= 1
        if not outlook.pays and self._saved_ms >= outlook.loss_ms:
            self.probing = True
            self.probes += 1
            # What it shows counts from the next round on.
            outlook.left = 0
        return outlook.pays or self.probing

    def outlook(self, shape: RoundShape) -> Outlook:
        """The outlook in force for a load; worked out anew every few rounds of it."""
        key = _load(shape)
        known = self._outlooks.get(key)
        if known is None or known.left <= 0:
            known = self._outlooks[key] = self._look_ahead(shape, known.rate if known else None)
        return known

    def remember(self, masses: Array, counts: NDArray[np.int64]) -> None:
        """Expected masses [B, N] of the drafts of a round, and their numbers of nodes [B]."""
        if not self.settled:
            self._outlooks.clear()
        masses, counts = masses[-REMEMBERED:], counts[-REMEMBERED:]
        places = (self._seen + np.arange(len(counts))) % REMEMBERED
        self._masses[places] = 0.0
        self._masses[places, : masses.shape[1]] = masses
        self._counts[places] = counts
        self._seen += len(counts)

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
        plain_rate = shape.batch / self._cost.plain_ms(bare)
        if not self._seen:
            return Outlook(True, 0.0, plain_rate)
        masses, counts = self._rounds_like(shape.batch)
        prices = np.zeros(shape.batch)
        ms = self._cost.drafted_ms(bare)
        drafted = best_rate(masses, counts, prices, ms, committed=shape.batch, start=last_rate or plain_rate)
        rate = max(plain_rate, drafted)
        choice = merge(masses, counts, prices, self._cost.drafted_ms(shape), rate)
        more_ms = float(choice.ms.mean()) - self._cost.plain_ms(shape)
        loss_ms = more_ms - float(choice.gain.mean()) / rate
        return Outlook(loss_ms < 0, max(loss_ms, 0.0), rate)

    def _rounds_like(self, batch: int) -> tuple[Array, NDArray[np.int64]]:
        """Remembered drafts as rounds of `batch` requests: masses [G, B, N], counts [G, B]."""
        known = min(self._seen, REMEMBERED, max(RECENT, batch))
        rounds = max(1, known // batch)
        # The latest; where more requests run than are remembered, some stand for several.
        rows = (self._seen - 1 - np.arange(rounds * batch) % known) % REMEMBERED
        return self._masses[rows].reshape(rounds, batch, -1), self._counts[rows].reshape(rounds, batch)


def _load(shape: RoundShape) -> tuple[int, int, int]:
    """Loads that share an outlook: batch and context within a quarter of an octave, chunks in steps of 128."""
    return (
        round(4 * math.log2(shape.batch)),
        round(4 * math.log2(shape.mean_context + 64)),
        -(-shape.chunk_tokens // 128),
    )
