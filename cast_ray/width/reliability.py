"""How far a drafter's masses hold: predicted mass against acceptance, learnt from every round.

The masses that come out are what a node is expected to bring. What they are worth in time is `width.merge`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cast_ray.width.curve import Array, pool_adjacent
from cast_ray.width.host import KINDS, OF_DRAFTER, HostTree, Whole

if TYPE_CHECKING:
    from cast_ray.width.prior import AcceptanceRecord

# Classes of temperature: greedy, then up to each of these, then above.
WARMTHS = np.array([0.0, 0.5, 1.0])
# Depths beyond share the last class.
DEPTHS = 16
# Records that are kept apart: of each kind of node (see `host`), each class of temperature.
RECORDS = KINDS * (len(WARMTHS) + 1)
# Classes of mass, half an octave each, from 1 down to 2**-12.
MASSES = 24
MIDDLES = np.exp2(-(np.arange(MASSES) + 0.5) / 2)
# Expected acceptances that a wider class's ratio is worth against a class's own.
PRIOR = 6.0
# Rounds after which the ratios are made anew: each of the first ones, then every so many.
FIRST_LOOKS, LOOK_EVERY = 8, 8
# Request-rounds of a temperature class after which what it counted weighs half: prompts change, and drafters are better
# at some than at others. A window of this size holds about a thousand accepted nodes.
HALF_LIFE = 384.0
RATIO_LIMITS = (1e-3, 8.0)
# Request-rounds of its own that a drafter's record is worth at most: where it is wrong here, it is outweighed soon.
RECORD_ROUNDS = 32.0
# How far a look at the outcome moves the steering, of what it was off by, and how far it goes (powers of two).
STEERING, STEERING_LIMITS = 0.3, (-6.0, 1.0)


class Reliability:
    """Acceptance of a node, given who proposed it, its prefix mass, its depth and its request's temperature.

    For each class the ratio r = accepted / mass promised is kept. A class that saw little leans on the same mass at all
    depths, that one on the same mass at all temperatures, and that one on the trend of all masses; never on nodes that
    others proposed. Within a depth `mass * r` is made non-decreasing in mass (isotonic); between the middles of classes
    r is interpolated.

    Then families are cut to what their parents have, which takes away and never adds. So the ratios of each depth are
    steered by a factor until what comes out, cut and all, is what is accepted.

    record: what the drafter's folder says was accepted of it elsewhere. It counts like a few rounds of its own, which
    fade as others do; without one, masses are believed until rounds say otherwise.
    """

    def __init__(self, record: AcceptanceRecord | None = None) -> None:
        self._counts = np.zeros((3, RECORDS, DEPTHS, MASSES))  # promised, accepted, nodes verified
        self._fresh = np.zeros((3, self._counts[0].size))
        self._fresh_requests = np.zeros((KINDS, len(WARMTHS) + 1))
        self._rounds = 0
        self._steering = np.zeros((RECORDS, DEPTHS))  # base 2, added to the log ratios
        self._outcome = np.zeros((2, self._steering.size))  # expected and accepted since the last look
        self._log_ratios: Array | None = None  # of every class, base 2, flat
        self.request_rounds = 0
        self._promised = self._expected = self._accepted = 0.0
        self._recorded = np.zeros((2, RECORDS, DEPTHS, MASSES))  # promised, accepted
        if record is not None:
            for warmth, rounds in record.rounds.items():
                sums = np.stack([record.promised[warmth], record.accepted[warmth]])
                self._recorded[:, OF_DRAFTER * (len(WARMTHS) + 1) + warmth] = min(rounds, RECORD_ROUNDS) * sums
            self._make_ratios()

    def calibrate(self, tree: HostTree) -> Array:
        """[B, N], the acceptance to be expected of each node; 0 where there is none.

        A node never outweighs its parent, nor siblings together theirs. Along N it need not fall: see `merge`.
        """
        if self._log_ratios is None or not tree.masses.size:
            return tree.masses
        log_masses = np.log2(np.maximum(tree.masses, 1e-30))
        place = np.minimum(np.maximum(-2 * log_masses - 0.5, 0.0), MASSES - 1.0)
        low = np.minimum(place.astype(np.int64), MASSES - 2)
        rows = _class_of(tree) + low
        here, there = self._log_ratios[rows], self._log_ratios[rows + 1]
        return _consistent(tree, np.exp2(np.minimum(log_masses + here + (there - here) * (place - low), 0.0)))

    def observe(self, tree: HostTree, expected: Array, widths: Whole, accepted: NDArray[np.bool_]) -> None:
        """Take in one drafted round.

        expected: [B, N], what `calibrate` made of the tree. widths: [B] nodes verified. accepted: [B, N], the nodes
        that were committed.
        """
        batch, nodes = tree.masses.shape
        if batch == 0 or nodes == 0:
            return
        verified = np.arange(nodes) < np.minimum(widths, tree.counts)[:, None]
        index, masses = (_class_of(tree) + class_of_mass(tree.masses))[verified], tree.masses[verified]
        size = self._fresh.shape[1]
        hits = accepted[verified]
        self._fresh[0] += np.bincount(index, masses, size)
        self._fresh[1] += np.bincount(index[hits], minlength=size)
        self._fresh[2] += np.bincount(index, minlength=size)
        coarse = index // MASSES
        self._outcome[0] += np.bincount(coarse, expected[verified], self._steering.size)
        self._outcome[1] += np.bincount(coarse[hits], minlength=self._steering.size)
        self._promised += float(masses.sum())
        self._expected += float(expected[verified].sum())
        self._accepted += int(hits.sum())
        self.request_rounds += batch
        # A kind that has no part in a round does not fade with it: the drafter's, while others' candidates do.
        kinds = [OF_DRAFTER] if tree.kinds is None else np.unique(tree.kinds[verified])
        if tree.warmth is None:
            self._fresh_requests[kinds, 0] += batch
        else:
            warmths = np.bincount(np.searchsorted(WARMTHS, tree.warmth), minlength=len(WARMTHS) + 1)
            self._fresh_requests[kinds] += warmths
        self._rounds += 1
        if self._rounds <= FIRST_LOOKS or self._rounds % LOOK_EVERY == 0:
            self._take_in()

    @property
    def ratio(self) -> float:
        """Nodes accepted over the masses that were verified; 1 before anything was. Below 1: over-confident."""
        return self._accepted / self._promised if self._promised > 0 else 1.0

    def report(self) -> dict[str, Any]:
        """Plain values: predicted and achieved round length, and by depth what was promised and accepted lately.

        `promised` is the drafter's own word, `predicted` what was made of it.
        """
        rounds = max(self.request_rounds, 1)
        promised, accepted, tried = (self._counts + self._fresh.reshape(self._counts.shape)).sum(axis=(1, 3)).tolist()
        return {
            "request_rounds": self.request_rounds,
            "ratio": self.ratio,
            "promised_round_length": 1.0 + self._promised / rounds,
            "predicted_round_length": 1.0 + self._expected / rounds,
            "achieved_round_length": 1.0 + self._accepted / rounds,
            "by_depth": [
                {"depth": depth + 1, "promised": promised[depth], "accepted": accepted[depth], "nodes": tried[depth]}
                for depth in range(DEPTHS)
                if tried[depth]
            ],
        }

    def _take_in(self) -> None:
        fade = (0.5 ** (self._fresh_requests.reshape(-1) / HALF_LIFE))[:, None, None]
        self._counts *= fade
        self._recorded *= fade
        self._counts += self._fresh.reshape(self._counts.shape)
        self._fresh[:] = 0.0
        self._fresh_requests[:] = 0.0
        expected, accepted = self._outcome.reshape(2, *self._steering.shape)
        off = np.log2((accepted + PRIOR) / (expected + PRIOR))
        self._steering = np.clip(self._steering + STEERING * off, *STEERING_LIMITS)
        self._outcome[:] = 0.0
        self._make_ratios()

    def _make_ratios(self) -> None:
        promised, hits = (self._counts[:2] + self._recorded).reshape(2, KINDS, -1, DEPTHS, MASSES)
        ratios = np.ones_like(promised)
        for kind in range(KINDS):
            if promised[kind].any():
                ratios[kind] = _ratios(promised[kind], hits[kind])
        log_ratios = np.log2(ratios).reshape(self._counts[0].shape) + self._steering[:, :, None]
        self._log_ratios = log_ratios.flatten()


def class_of_mass(masses: Array) -> Whole:
    """Which half octave below 1 each mass lies in, any shape; the last holds all that is lighter."""
    return np.minimum(-2 * np.log2(np.maximum(masses, 1e-30)), MASSES - 1).astype(np.int64)


def _class_of(tree: HostTree) -> Whole:
    """[B, N], where the mass classes of each node's kind, temperature and depth begin."""
    rows = np.minimum(np.maximum(tree.depths - 1, 0), DEPTHS - 1)
    if tree.warmth is not None:
        rows = rows + np.searchsorted(WARMTHS, tree.warmth)[:, None] * DEPTHS
    if tree.kinds is not None:
        rows = rows + tree.kinds * (len(WARMTHS) + 1) * DEPTHS
    return rows * MASSES


def _consistent(tree: HostTree, masses: Array) -> Array:
    """Masses of which no family outweighs its parent, [B, N]; where one does, it is scaled down with all below it.

    Rows of the padded arrays: the root first, then the nodes; all requests in one line.
    """
    batch, nodes = masses.shape
    starts = np.arange(batch)[:, None] * (nodes + 1)
    parents = np.zeros((batch, nodes + 1), dtype=np.int64)
    parents[:, 1:] = tree.parents + 1
    parents = (parents + starts).ravel()
    padded = np.ones((batch, nodes + 1))
    padded[:, 1:] = masses
    edges = np.minimum(padded.ravel() / np.maximum(padded.ravel()[parents], 1e-30), 1.0)
    real = np.zeros((batch, nodes + 1))
    real[:, 1:] = tree.depths > 0
    families = np.bincount(parents, edges * real.ravel(), len(parents))
    total = edges / np.maximum(families, 1.0)[parents]
    total.reshape(batch, nodes + 1)[:, 0] = 1.0
    # The product along each node's path, in as many steps as the depth has binary digits: every step multiplies by
    # what lies above as far as the last one had come, and doubles the reach.
    for _ in range(int(tree.depths.max() - 1).bit_length()):
        total = total * total[parents]
        parents = parents[parents]
    return (total.reshape(batch, nodes + 1) * real)[:, 1:]


def _ratios(promised: Array, accepted: Array) -> Array:
    """r of every class, [warmths, DEPTHS, MASSES]: shrunk towards wider classes, isotonic within a depth."""
    by_mass = promised.sum(axis=(0, 1)), accepted.sum(axis=(0, 1))
    of_mass = _shrunk(*by_mass, _trend(*by_mass))
    of_warmth = _shrunk(promised.sum(axis=1), accepted.sum(axis=1), of_mass)
    ratios = np.clip(_shrunk(promised, accepted, of_warmth[:, None, :]), *RATIO_LIMITS)
    endless = np.full(MASSES, np.inf)
    for warmth in range(len(ratios)):
        tried = promised[warmth].sum(axis=1) > 0
        # A depth that was never tried is taken for the mean of all depths.
        rows = [*np.flatnonzero(tried), *np.flatnonzero(~tried)[:1]]
        for depth in rows:
            # Classes run from heavy to light.
            expected = (ratios[warmth, depth] * MIDDLES)[::-1]
            weights = (promised[warmth, depth] + PRIOR * MIDDLES)[::-1]
            ratios[warmth, depth] = pool_adjacent(expected, weights, endless)[::-1] / MIDDLES
        ratios[warmth, ~tried] = ratios[warmth, rows[-1]]
    return np.clip(ratios, *RATIO_LIMITS)


def _trend(promised: Array, accepted: Array) -> Array:
    """The ratio as a power of the mass, [MASSES]: what light candidates that nobody verified are taken for.

    A drafter that is sharper than its target is over-confident of its best prefixes and not of the light ones, and
    `mass ** power` is just what a softmax of too low a temperature does to it. Weighted least squares in logarithms,
    with a prior of no trend at a ratio of 1.
    """
    places = np.stack([np.ones(MASSES), (np.arange(MASSES) + 0.5) / 8])
    off = np.log2((accepted + 0.5) / (promised + 0.5))
    weights = (places * promised) @ places.T + PRIOR * np.eye(2)
    return np.exp2(np.clip(np.linalg.solve(weights, (places * promised) @ off) @ places, -6.0, 2.0))


def _shrunk(promised: Array, accepted: Array, towards: Array) -> Array:
    return (accepted + PRIOR * towards) / (promised + PRIOR)
