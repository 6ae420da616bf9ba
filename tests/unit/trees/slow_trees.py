"""Slow, obvious versions of what `cast_ray.trees` does, one request at a time, for the tests to compare with."""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch

from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree

STYLES = ("smooth", "peaked", "quantised", "sparse")


def random_scores(
    seed: int, batch: int, depths: int, candidates: int, style: str, pairwise: bool = False, vocab: int = 0
) -> DraftScores:
    """Tables of one style. quantised: many exact ties, some of probability 1; sparse: about half is -inf."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, depths, candidates)
    logits = torch.randn(shape, generator=generator) * (6.0 if style == "peaked" else 2.0)
    logprobs = logits.log_softmax(dim=-1)
    if style == "quantised":
        levels = torch.tensor([1.0, 0.5, 0.25, 0.125]).log()
        logprobs = levels[torch.randint(4, shape, generator=generator)]
    if style == "sparse":
        logprobs = logprobs.masked_fill(torch.rand(shape, generator=generator) < 0.5, -math.inf)
    vocab = max(vocab, candidates)
    token_ids = torch.rand(batch, depths, vocab, generator=generator).argsort(dim=-1)[..., :candidates]
    pairs = torch.randn(batch, depths - 1, candidates, candidates, generator=generator) if pairwise else None
    return DraftScores(logprobs, token_ids, pairs)


def conditional(scores: DraftScores, request: int, path: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities [K] of the candidates that may follow the candidates of `path`."""
    own = scores.logprobs[request, len(path)].numpy()
    if scores.pairwise is None or not path:
        return own
    joint = own.astype(np.float64) + scores.pairwise[request, len(path) - 1, path[-1]].numpy()
    total = sum(math.exp(value) for value in joint)
    return np.array([value - math.log(total) if total else -math.inf for value in joint], dtype=np.float32)


def best_first(scores: DraftScores, request: int, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """(log mass, candidate indices) of the `count` heaviest prefixes, by a heap; ties to the shallower."""
    _, depths, _ = scores.logprobs.shape

    def children(log_mass: float, path: tuple[int, ...]) -> list[tuple[float, int, tuple[int, ...]]]:
        if len(path) == depths:
            return []
        values = conditional(scores, request, path)
        grown = [(np.float32(log_mass) + values[k], (*path, k)) for k in range(len(values))]
        return [(-float(mass), len(longer), longer) for mass, longer in grown if mass > -math.inf]

    heap = children(0.0, ())
    heapq.heapify(heap)
    found = []
    while heap and len(found) < count:
        negative, _, path = heapq.heappop(heap)
        found.append((-negative, path))
        for child in children(-negative, path):
            heapq.heappush(heap, child)
    return found


def path_to(tree: CandidateTree, request: int, node: int) -> list[int]:
    """Nodes from the first depth down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        parent = int(tree.parents[request, node])
        assert -1 <= parent < node, "a parent must come before its child"
        node = parent
    return path[::-1]


def walk(target: list[int], tree: CandidateTree, request: int, width: int) -> tuple[list[int], list[int]]:
    """Rows stepped on and tokens committed, one step after the other."""
    rows, committed = [0], [target[0]]
    while True:
        for node in range(min(width, int(tree.counts[request]))):
            is_child = int(tree.parents[request, node]) + 1 == rows[-1]
            if is_child and int(tree.tokens[request, node]) == committed[-1]:
                rows.append(node + 1)
                committed.append(target[node + 1])
                break
        else:
            return rows, committed
