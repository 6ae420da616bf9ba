"""An engine without a model: rounds whose trees and target tokens come from a `World`, and times from a function.

It tells a policy what a real engine would, and counts tokens and ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from cast_ray.trees.accept import accept
from cast_ray.trees.tree import CandidateTree, ancestor_mask
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from cast_ray.width.policy import WidthPolicy
from cast_ray.width.shape import RoundShape, RoundTimes
from tests.unit.width.simulated_rounds import World

NODES = 63
HOST_MS = 0.5
CONTEXT = 256


@dataclass(frozen=True)
class Device:
    """verify: ms of a forward by packed tokens; draft: ms of the drafter by batch."""

    verify: Callable[[int], float]
    draft: Callable[[int], float] = lambda batch: 1.5

    def table(self, batches: tuple[int, ...] = (1,), noise: float = 0.0, seed: int = 0) -> LatencyTable:
        """What a probe would measure: every width, medians of nine, and how far the nine spread."""
        rng = np.random.default_rng(seed)
        points = []
        for batch in batches:
            for tokens in range(batch, batch * (NODES + 1) + 1, batch):
                repeats = self.verify(tokens) * (1 + noise * rng.standard_normal(9))
                median = float(np.median(repeats))
                points.append(LatencyPoint(tokens, batch, CONTEXT, median, float(np.median(np.abs(repeats - median)))))
        return LatencyTable(points, [DraftPoint(batch, CONTEXT, self.draft(batch)) for batch in batches], HOST_MS)


class Prompts:
    """A stock of request-rounds to draw batches from, so that rounds cost no time to make."""

    def __init__(self, sharpness: float, seed: int = 0, stock: int = 2048, depths: int = 5) -> None:
        self._tree, self._true_mass, self._target = World(seed, sharpness, NODES, depths).round(stock)

    def draw(self, batch: int, rng: np.random.Generator) -> tuple[CandidateTree, torch.Tensor, torch.Tensor]:
        """Trees, the true mass of each node [B, N], and what the target says [B, N+1]."""
        rows = torch.from_numpy(rng.integers(0, len(self._target), batch))
        tree = self._tree
        picked = CandidateTree(
            tree.tokens[rows],
            tree.parents[rows],
            tree.depths[rows],
            tree.masses[rows],
            tree.counts[rows],
            tree.max_depth,
        )
        return picked, self._true_mass[rows], self._target[rows]


@dataclass
class Run:
    """What a stretch of rounds came to: expected tokens, for luck is no merit, and ms without noise and stalls."""

    tokens: float = 0.0
    ms: float = 0.0
    drafted: int = 0
    nodes: int = 0
    rounds: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.ms

    @property
    def width(self) -> float:
        return self.nodes / self.rounds


def run(
    policy: WidthPolicy,
    device: Device,
    prompts: Prompts,
    *,
    batch: int,
    rounds: int,
    noise: float = 0.0,
    seed: int = 0,
    stall: Callable[[int], float] = lambda number: 1.0,
    hopeless: bool = False,
) -> Run:
    """`rounds` rounds of `batch` requests; the same seed draws the same prompts for every policy that drafts.

    stall: by what factor round number i takes longer. hopeless: the target agrees with no candidate.
    """
    rng, drawing = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    done = Run()
    for number in range(rounds):
        shape = RoundShape([CONTEXT + 10] * batch)
        drafted = policy.max_nodes > 0 and policy.drafts(shape)
        committed, expected, nodes = batch, float(batch), 0
        if drafted:
            tree, true_mass, target = prompts.draw(batch, drawing)
            if hopeless:
                target = torch.full_like(target, -1)
            tree = tree.slice(policy.max_nodes)
            widths = policy.choose(tree, shape)
            width = int(widths.max())
            nodes = int(widths.sum())
            accepted = accept(target[:, : width + 1], tree.slice(width), widths, ancestor_mask(tree, width))
            policy.observe(tree, widths, accepted, None)
            committed = int(accepted.lengths.sum())
            verified = torch.arange(tree.max_nodes) < widths[:, None]
            expected += 0.0 if hopeless else float((true_mass[:, : tree.max_nodes] * verified).sum())
        verify_ms, draft_ms = device.verify(batch + nodes), device.draft(batch) if drafted else 0.0
        factor = stall(number) * (1 + noise * rng.standard_normal())
        measured = RoundTimes(
            shape, batch + nodes, drafted, draft_ms * factor, verify_ms * factor, HOST_MS * factor, committed
        )
        policy.timed(measured)
        done.tokens += expected
        done.ms += verify_ms + draft_ms + HOST_MS
        done.drafted += drafted
        done.nodes += nodes
        done.rounds += 1
    return done
