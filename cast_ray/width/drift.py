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
# Trust in what a region of token counts took fades with each round elsewhere: nobody knows whether it still holds.
FADE = 0.98
# Rounds in which a region earns half of full trust.
DOUBT = 0.5
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

    def observe(self, value: float) -> bool:
        """Take in one observation. True where the level jumped with it."""
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
                return True
            off = math.copysign(far, off)
        step = max(STEP, 1.0 / (self.seen + PRIOR))
        self.value += step * off
        self._spread += step * (abs(off) - self._spread)
        return False

    def expects(self, value: float) -> bool:
        """Whether an observation would be within the noise."""
        return abs(value - self.value) <= FAR * max(self._spread, LEAST_SPREAD)


class _Region(Level):
    """The level of one region of token counts. It is trusted less and less while rounds run elsewhere, the more slowly
    the more often it was found as it had been.

    doubtful: the device has changed since rounds last ran here.
    """

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.doubtful = True
        self._worth = 0.0  # `seen` when rounds last ran here
        self._confirmed = 0

    def observe(self, value: float) -> bool:
        expected = self.expects(value)
        if self.seen < 0.5 * self._worth:
            self._confirmed = self._confirmed + 1 if expected else 0
        jumped = super().observe(value)
        self._worth = self.seen
        if self.doubtful and (expected or jumped):
            # It was as it had been, or it is known anew: in no case has the device just changed.
            self.doubtful = jumped = False
        return jumped

    def rest(self) -> None:
        """A round ran elsewhere."""
        self.seen *= 1.0 - (1.0 - FADE) * 0.5**self._confirmed

    @property
    def trust(self) -> float:
        """How far its own level is believed, 0..1."""
        return self.seen / (self.seen + DOUBT)


class Correction:
    """By what factor one kind of forward is slower than its table says, by packed tokens.

    Each half octave of counts has its own level. Where rounds run now tells most of the device as a whole (heat,
    neighbours): a region that has not been visited lately is believed to be off by as much. A jump is taken to be
    everybody's, until a look at another region says otherwise. Between the middles of regions it is interpolated, so
    that the correction draws no steps of its own.
    """

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}
        self._here: _Region | None = None

    def observe(self, tokens: float, predicted_ms: float, measured_ms: float) -> float:
        """Take in one forward; times that are no times are passed over. Where the device has changed, returns the
        logarithm of by how much, else 0: what other token counts take is then anybody's guess."""
        if not (predicted_ms > 0 and measured_ms > 0):
            return 0.0
        place = round(2 * math.log2(max(tokens, 1.0)))
        if place not in self._regions:
            self._regions[place] = _Region(math.log(self.overall))
        here = self._regions[place]
        others = [region for region in self._regions.values() if region is not here]
        before = here.value
        jumped = here.observe(math.log(measured_ms / predicted_ms))
        for other in others:
            other.rest()
            if jumped:
                other.value += here.value - before
                other.doubtful = True
        self._here = here
        return here.value - before if jumped else 0.0

    def factor(self, tokens: Array) -> Array:
        """Measured over predicted ms at packed token counts of any shape, same shape."""
        if self._here is None:
            return np.ones_like(tokens)
        places, base = sorted(self._regions), self._here.value
        levels = [base + region.trust * (region.value - base) for region in map(self._regions.__getitem__, places)]
        return np.exp(np.interp(2 * np.log2(np.maximum(tokens, 1.0)), places, levels))

    @property
    def overall(self) -> float:
        """The factor where rounds run now."""
        return math.exp(self._here.value) if self._here is not None else 1.0
