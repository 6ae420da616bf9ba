"""Decodes with a given width policy and keeps what every round took. It judges nothing; `stats.sweep` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.engine.engine import Engine
from cast_ray.request import Prompt, SamplingParams
from cast_ray.trees.accept import Accepted
from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.policy import WidthPolicy
from cast_ray.width.shape import RoundShape, RoundTimes

# A round counts with at most so many times the median round of its run: another process's stall is no one's cost.
STALL = 3.0


class Watched:
    """A width policy and, beside it, what its rounds took: their times, and the nodes verified in each."""

    def __init__(self, policy: WidthPolicy) -> None:
        self._policy = policy
        self.name = policy.name
        self.max_nodes = policy.max_nodes
        self.branching = policy.branching
        self.times: list[RoundTimes] = []
        self.nodes: list[int] = []
        self._nodes = 0

    def drafts(self, shape: RoundShape) -> bool:
        return self._policy.drafts(shape)

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        chosen = self._policy.choose(tree, shape)
        self._nodes = int(chosen.sum())
        return chosen

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        self._policy.observe(tree, widths, accepted, temperatures)

    def timed(self, times: RoundTimes) -> None:
        self._policy.timed(times)
        self.times.append(times)
        self.nodes.append(self._nodes)
        self._nodes = 0

    def report(self) -> dict[str, object]:
        return self._policy.report()


@dataclass(frozen=True)
class Run:
    """One policy on one group of prompts, prefill left out.

    ms: decoding time without stalls. tokens: committed. request_rounds: rounds of all requests. nodes: verified.
    """

    ms: float
    tokens: int
    request_rounds: int
    nodes: int

    @property
    def ms_a_token(self) -> float:
        """Decoding ms a committed token."""
        return self.ms / self.tokens

    @property
    def round_length(self) -> float:
        """Committed tokens a round of a request."""
        return self.tokens / self.request_rounds


def decode(
    engine: Engine,
    policy: WidthPolicy,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    drafter: Drafter | None = None,
) -> Run:
    """Decode `prompts` together with widths by `policy`, which learns from it."""
    watched = Watched(policy)
    engine.use_policy(watched, drafter)
    engine.generate(list(prompts), params)
    # Rounds that also read a prompt are longer for it; their decoding is not to be told apart.
    pure = [index for index, times in enumerate(watched.times) if not times.shape.chunk_tokens]
    kept = pure or list(range(len(watched.times)))
    ms = np.array([watched.times[index].total_ms for index in kept])
    return Run(
        ms=float(np.minimum(ms, STALL * np.median(ms)).sum()),
        tokens=sum(watched.times[index].committed for index in kept),
        request_rounds=sum(watched.times[index].shape.batch for index in kept),
        nodes=sum(watched.nodes[index] for index in kept),
    )


class Balanced:
    """A drafter's two likeliest tokens at each depth, all held equally likely: packed, a complete binary tree.

    For the ablation of shapes: as many nodes as the tree by mass, put without looking at masses.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.block_size = drafter.block_size
        self.taps = drafter.taps

    def shape(self) -> dict[str, object]:
        return self._drafter.shape()

    def observe(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        self._drafter.observe(features, slots, positions)

    def forget(self, pages: list[int]) -> None:
        self._drafter.forget(pages)

    def propose(self, contexts: DraftContexts, top_k: int) -> DraftScores:
        scores = self._drafter.propose(contexts, max(top_k, 2))
        best = scores.logprobs.topk(min(2, scores.logprobs.shape[2]), dim=2).indices
        even = torch.full(best.shape, -np.log(2.0), device=best.device)
        return DraftScores(even, scores.token_ids.gather(2, best))
