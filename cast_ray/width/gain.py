"""What a width brings: expected round length from prefix masses, and from what rounds really accepted.

It knows no time; `width.policy` weighs the gain against `width.latency`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cast_ray.width.curve import Array, pool_adjacent
from cast_ray.width.host import Whole

# Expected acceptances that the prior is worth: a rank's own record outweighs its neighbourhood's, and that one the
# record of all ranks together, once it rests on more than these.
PRIOR_ACCEPTED = 16.0


class RoundLengthEstimate:
    """The mean R(N) of one engine, learnt from its rounds for all N at once.

    The tree of N nodes is a slice of every wider one, so a node of rank i that was verified and accepted counts for
    every N >= i, whatever width it was verified in. With m_i the mean mass at rank i over all rounds, R(N) is
    `1 + sum_{i<=N} m_i * r_i`, where r_i is the reliability of rank i: nodes accepted at it over the sum of masses
    verified at it. Where every round verified rank i, `m_i * r_i` is just the share of rounds that accepted it.
    A rank with few observations, or none, leans on the reliability of the ranks around it: drafters tend to be
    over-confident of their best prefixes and not of the light ones, so one number for all ranks would misjudge both.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self._rounds_offering = np.zeros(0)
        self._mass_offered = np.zeros(0)
        self._mass_verified = np.zeros(0)
        self._accepted = np.zeros(0)

    def observe(self, masses: Array, widths: Whole, accepted: NDArray[np.bool_]) -> None:
        """Take in one round of B requests.

        masses: [B, N] of the whole packed tree, 0 where there is no node. Not of the verified slice alone: what lies
            beyond it tells what a wider tree would bring.
        widths: [B], nodes verified. accepted: [B, N], the nodes that were committed.
        """
        batch, nodes = masses.shape
        if batch == 0 or nodes == 0:
            return
        verified = np.arange(nodes) < widths[:, None]
        self._grow(nodes)
        self.rounds += batch
        self._rounds_offering[:nodes] += batch
        self._mass_offered[:nodes] += masses.sum(axis=0)
        self._mass_verified[:nodes] += (masses * verified).sum(axis=0)
        self._accepted[:nodes] += accepted.sum(axis=0)

    @property
    def reliability(self) -> float:
        """Nodes accepted over the masses that were verified; 1 before anything was. Below 1: over-confident."""
        predicted = float(self._mass_verified.sum())
        return float(self._accepted.sum()) / predicted if predicted > 0 else 1.0

    def predicted(self) -> float:
        """Mean round length that the masses of the verified nodes promised, before any correction."""
        return 1.0 + float(self._mass_verified.sum()) / self.rounds if self.rounds else 1.0

    def achieved(self) -> float:
        """Mean round length of the observed rounds."""
        return 1.0 + float(self._accepted.sum()) / self.rounds if self.rounds else 1.0

    def mean(self, max_nodes: int) -> Array:
        """R(0..max_nodes), [max_nodes+1] float64, concave. Ranks that no tree has had yet add nothing."""
        mean_masses = self._mass_offered / np.maximum(self._rounds_offering, 1)
        ranks = np.arange(1.0, len(mean_masses) + 1)
        # Ranks a factor apart: twice as high counts a quarter.
        near = np.square(np.minimum.outer(ranks, ranks) / np.maximum.outer(ranks, ranks))
        around = _shrunk(near @ self._accepted, near @ self._mass_verified, self.reliability)
        adds = mean_masses * _shrunk(self._accepted, self._mass_verified, around)
        # Deeper ranks are lighter in truth too, to a good approximation: without this, luck at single ranks would make
        # a wide tree look good.
        equal = np.ones_like(adds)
        adds = -pool_adjacent(-adds, equal, np.full_like(adds, np.inf))
        adds = np.pad(adds, (0, max(0, max_nodes - len(adds))))[:max_nodes]
        return 1.0 + np.concatenate([[0.0], np.cumsum(adds)])

    def to_dict(self) -> dict[str, float]:
        """Plain values for reports."""
        return {
            "rounds": self.rounds,
            "reliability": self.reliability,
            "predicted_round_length": self.predicted(),
            "achieved_round_length": self.achieved(),
        }

    def _grow(self, nodes: int) -> None:
        missing = nodes - len(self._accepted)
        if missing > 0:
            self._rounds_offering = np.pad(self._rounds_offering, (0, missing))
            self._mass_offered = np.pad(self._mass_offered, (0, missing))
            self._mass_verified = np.pad(self._mass_verified, (0, missing))
            self._accepted = np.pad(self._accepted, (0, missing))


def _shrunk(accepted: Array, promised: Array, towards: Array | float) -> Array:
    """The reliability accepted / promised, leaning on another where little was promised. [N] float64."""
    return (accepted + PRIOR_ACCEPTED * towards) / (promised + PRIOR_ACCEPTED)
