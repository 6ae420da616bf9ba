"""Following a quantity that drifts and jumps, through noise and stalls: how measured times correct predicted ones.

It knows only logarithms of ratios; what they are ratios of is the caller's.
"""

from __future__ import annotations

import math

import numpy as np

from cast_ray.width.curve import Array

# A level moves by this share of what it is off by, once it rests on many observations.
STEP = 0.05
# An observation beyond so many mean deviations is held back ...
FAR = 3.0
# ... until so many in a row lie to the same side: then the level has jumped.
STREAK = 3
# Observations that the first guess is worth.
PRIOR = 3.0
# Relative noise below which no observation counts as far off, and the noise that is assumed at first.
LEAST_SPREAD = 0.02
FIRST_SPREAD = 0.1
# What a region of token counts adds fades with each round elsewhere: nobody knows whether it still holds.
FADE = 0.96
# A region's own part leaks into the common level by so much a round.
LEAK = 0.985
# A jump is at most a factor of e**4: a device asleep is no slow device.
MOST = 4.0


class Level:
    """The running level of a noisy series.

    A single stall, however long, moves it by no more than noise does; a change that lasts is met at its third
    observation. Slow drift is followed with a memory of some twenty.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.seen = 0.0
        self._spread = FIRST_SPREAD
        self._astray: list[float] = []

    def observe(self, value: float) -> None:
        """Take in one observation."""
        self.seen += 1
        off = value - self.value
        far = FAR * max(self._spread, LEAST_SPREAD)
        if abs(off) <= far:
            self._astray.clear()
        else:
            if self._astray and (self._astray[-1] > self.value) != (value > self.value):
                self._astray.clear()
            self._astray.append(value)
            if len(self._astray) >= STREAK:
                jump = sorted(self._astray)[len(self._astray) // 2] - self.value
                self.value += min(max(jump, -MOST), MOST)
                self._astray.clear()
                return
            off = math.copysign(far, off)
        step = max(STEP, 1.0 / (self.seen + PRIOR))
        self.value += step * off
        self._spread += step * (abs(off) - self._spread)


class Correction:
    """By what factor one kind of forward is slower than its table says, by packed tokens.

    A level for all counts follows the device as a whole (heat, neighbours); on top of it each half octave of counts has
    its own, which mends the table's shape where rounds really run. Between their middles it is interpolated, so that
    the correction draws no steps of its own.
    """

    def __init__(self) -> None:
        self._all = Level()
        self._regions: dict[int, Level] = {}

    def observe(self, tokens: float, predicted_ms: float, measured_ms: float) -> None:
        """Take in one forward; times that are no times are passed over."""
        if not (predicted_ms > 0 and measured_ms > 0):
            return
        off = math.log(measured_ms / predicted_ms)
        region = self._regions.setdefault(round(2 * math.log2(max(tokens, 1.0))), Level())
        for other in self._regions.values():
            if other is not region:
                other.seen *= FADE
        self._all.observe(off - _settled(region))
        region.observe(off - self._all.value)
        # What one region alone says belongs to the device as a whole, unless others contradict it.
        region.value *= LEAK

    def factor(self, tokens: Array) -> Array:
        """Measured over predicted ms at packed token counts of any shape, same shape."""
        if not self._regions:
            return np.ones_like(tokens)
        places = sorted(self._regions)
        own = np.array([_settled(self._regions[place]) for place in places])
        return np.exp(self._all.value + np.interp(2 * np.log2(np.maximum(tokens, 1.0)), places, own))

    @property
    def overall(self) -> float:
        """The factor of the device as a whole."""
        return math.exp(self._all.value)


def _settled(region: Level) -> float:
    """What a region adds, held back while it rests on few rounds."""
    return region.value * region.seen / (region.seen + 1.0)
