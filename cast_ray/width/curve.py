"""Small pieces of curve arithmetic for latency and acceptance: pooling of violators, interpolation between curves.

It knows neither tokens nor milliseconds; what the axes mean is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Curve = TypeVar("Curve")


def pool_adjacent(values: Array, weights: Array, noise: Array) -> Array:
    """Make a sequence non-decreasing wherever a fall is within the noise of the two sides, and only there.

    values, weights, noise: [n]. Pool-adjacent-violators: a fall from `a` to `b` with `a - b <= noise_a + noise_b` is
    replaced by the weighted mean of both. A pooled block keeps the mean noise of its members, so that many small falls
    do not hide a large one. With infinite noise this is isotonic regression. Returns [n] float64.
    """
    blocks: list[tuple[float, float, float, int]] = []  # value, weight, noise, members
    for value, weight, spread in zip(values.tolist(), weights.tolist(), noise.tolist(), strict=True):
        members = 1
        while blocks and 0 < blocks[-1][0] - value <= blocks[-1][2] + spread:
            left, left_weight, left_spread, left_members = blocks.pop()
            value = (left * left_weight + value * weight) / (left_weight + weight)
            spread = (left_spread * left_members + spread * members) / (left_members + members)
            weight += left_weight
            members += left_members
        blocks.append((value, weight, spread, members))
    return np.repeat([block[0] for block in blocks], [block[3] for block in blocks]).astype(np.float64)


def smooth_within_noise(places: Array, values: Array, noise: Array, reach: float) -> Array:
    """Average each value with its neighbours, as far as they differ by no more than noise: steps stay, jitter goes.

    places, values, noise: [n]. Neighbours within about `reach` count (a Gaussian in the distance), and they count less
    the further their values lie apart in units of the noise (the range weight of a bilateral filter). Returns [n].
    """
    spread = np.maximum((noise[:, None] + noise[None, :]) / 2, 1e-9)
    far = np.square((places[:, None] - places[None, :]) / reach)
    apart = np.square((values[:, None] - values[None, :]) / spread)
    weights = np.exp(-far - apart) / np.square(np.maximum(noise, 1e-9))[None, :]
    return (weights @ values) / weights.sum(axis=1)


def between(curves: Mapping[int, Curve], at: float, value: Callable[[int], Array]) -> Array:
    """`value(key)` interpolated linearly in the key, clamped to the first and last key of `curves`."""
    keys = sorted(curves)
    if at <= keys[0]:
        return value(keys[0])
    if at >= keys[-1]:
        return value(keys[-1])
    above = next(index for index, key in enumerate(keys) if key >= at)
    low, high = keys[above - 1], keys[above]
    if high == at:
        return value(high)
    share = (at - low) / (high - low)
    return (1 - share) * value(low) + share * value(high)
