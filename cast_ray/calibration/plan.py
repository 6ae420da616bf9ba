"""Where a latency curve should be measured next: the count that would tell most about its shape. Measures nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

# A bend below this share of the point's own time changes no width worth speaking of.
LEAST_BEND = 0.03
# An interval this short in relation to its counts is not cut again.
LEAST_GAP = 1 / 16
# The smallest tile of matrix kernels beyond which a step is worth a point of its own.
FIRST_TILE = 16


def coarse_counts(most: int) -> list[int]:
    """Packed token counts to begin with: powers of two up to `most`, and `most` itself.

    From FIRST_TILE on each with the next count: stairs at multiples of a tile look straight at powers of two alone.
    """
    counts, power = {most}, 1
    while power < most:
        counts |= {power} if power < FIRST_TILE else {power, power + 1}
        power *= 2
    return sorted(counts)


def next_count(curve: Mapping[int, tuple[float, float]]) -> int | None:
    """The middle of the interval in which the curve bends most, or None where no bend stands out of the noise.

    curve: packed tokens -> (ms, noise in ms), at least one point.
    A point bends the curve by what it lies off the line between its two neighbours, less the noise of all three. A step
    bends it on both sides, so bisection closes in on it; straight and flat stretches get no more points. Middles are
    rounded to multiples of 16, 8, … where there is one near, for kernels' tiles end there.
    """
    counts = sorted(curve)
    best, chosen = 0.0, None
    for low, high in itertools.pairwise(counts):
        gap = high - low
        if gap <= max(1.0, LEAST_GAP * low):
            continue
        # Neighbours no nearer than half the interval: what lies close by shows a tile's step, or noise, no slope.
        before = max((count for count in counts if count <= low - gap / 2), default=counts[0])
        behind = min((count for count in counts if count >= high + gap / 2), default=counts[-1])
        bend = max(_bend(curve, before, low, high), _bend(curve, low, high, behind))
        rise = abs(curve[high][0] - curve[low][0]) - curve[high][1] - curve[low][1]
        # How far off a straight line could be inside: not more than the rise, and only where an end bends.
        worth = min(bend, rise) / curve[low][0]
        if worth > max(best, LEAST_BEND):
            best, chosen = worth, _middle(low, high)
    return chosen


def _bend(curve: Mapping[int, tuple[float, float]], low: int, here: int, high: int) -> float:
    """How far the point lies off the line between the other two, beyond their noise."""
    if not low < here < high:
        return 0.0
    share = (here - low) / (high - low)
    line = curve[low][0] + share * (curve[high][0] - curve[low][0])
    return abs(curve[here][0] - line) - sum(curve[count][1] for count in (low, here, high))


def _middle(low: int, high: int) -> int:
    """Strictly between both, on a tile's boundary where one lies in the middle half."""
    quarter = (high - low) / 4
    for tile in (64, 32, 16, 8, 4, 2):
        nearest = round((low + high) / 2 / tile) * tile
        if low + quarter <= nearest <= high - quarter:
            return nearest
    return (low + high) // 2
