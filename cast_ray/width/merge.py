"""One budget for all requests of a round: the step in which `joint` decides.

Pure arithmetic on arrays of the host; where masses and costs come from is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cast_ray.width.curve import Array


@dataclass(frozen=True)
class Choice:
    """What was chosen for G rounds.

    widths: [G, B] int64, nodes of each request. gain: [G], the masses chosen, added up.
    ms: [G], predicted time of each round. nodes: [G] int64, candidates of all its requests together.
    """

    widths: NDArray[np.int64]
    gain: Array
    ms: Array
    nodes: NDArray[np.int64]


def merge(
    masses: Array,
    counts: NDArray[np.int64],
    prices: Array,
    ms: Array,
    rate: float,
    least: int = 0,
    most: int | None = None,
) -> Choice:
    """The widths that maximise `sum of masses - rate * time` in each of G rounds, looked at for every total M.

    masses: [G, B, N], what each node is expected to bring, by rank.
    counts: [G, B], nodes that there are; what lies behind them is padding.
    prices: [B] ms that one node of a request costs more (or less) than one of the others.
    ms: [B * N + 1], time of a round in which M candidates are verified in all. Of any shape: steps, dips, cliffs.
    rate: tokens that a ms is worth. least, most: verify at least (where there are so many), at most so many candidates.

    A request's nodes are taken in their order, so its slice stays closed under parents. Where a node outweighs one of
    its own request before it, it waits for that one: the order is by the running minimum, the gain by its own mass.
    """
    rounds, batch, nodes = masses.shape
    real = np.arange(nodes) < counts[:, :, None]
    gains = np.where(real, masses - rate * prices[:, None], -np.inf)
    heaviness = np.minimum.accumulate(gains, axis=2).reshape(rounds, -1)
    # Stable: of equals the earlier goes first, so that a node never overtakes its parent.
    order = np.argsort(-heaviness, axis=1, kind="stable")
    net = np.zeros((rounds, batch * nodes + 1))
    np.cumsum(np.take_along_axis(gains.reshape(rounds, -1), order, axis=1), axis=1, out=net[:, 1:])
    net -= rate * ms
    forced = np.minimum(least, counts.sum(axis=1))
    net[np.arange(batch * nodes + 1) < forced[:, None]] = -np.inf
    if most is not None:
        net[:, most + 1 :] = -np.inf
    # The first of equals: the narrower tree.
    best = net.argmax(axis=1)

    chosen = np.arange(batch * nodes) < best[:, None]
    owner = order // nodes + batch * np.arange(rounds)[:, None]
    widths = np.bincount(owner[chosen], minlength=rounds * batch).reshape(rounds, batch)
    taken = np.arange(nodes) < widths[:, :, None]
    gain = (masses * taken).sum(axis=(1, 2))
    return Choice(widths, gain, ms[best] + widths @ prices, best)


def best_rate(
    masses: Array, counts: NDArray[np.int64], prices: Array, ms: Array, *, committed: float, start: float
) -> float:
    """The most tokens per ms that drafted rounds like these G bring.

    The fixed point of `merge` by Dinkelbach's method: the rate of what was best at the last rate. It is met from below
    after the first step, wherever that started.
    committed: tokens that each round brings without a candidate. start: a rate near it saves steps.
    """
    for _ in range(10):
        choice = merge(masses, counts, prices, ms, start)
        better = float((committed + choice.gain).sum() / choice.ms.sum())
        if abs(better - start) <= 1e-5 * start:
            break
        start = better
    return better
