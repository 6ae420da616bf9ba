"""What the ablation benchmark counts as a round: the label's own path in a tree, found in another way."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ablation import accepted
from cast_ray.trees.pack import DraftScores, pack, pack_chain
from cast_ray.trees.tree import CandidateTree


def _prefixes(tree: CandidateTree, row: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        found.append((*(found[parent] if parent >= 0 else ()), int(tree.tokens[row, node])))
    return set(found)


@pytest.mark.parametrize("pairwise", [False, True])
def test_accepted_is_the_longest_prefix_of_the_label_in_the_tree(pairwise: bool) -> None:
    torch.manual_seed(0)
    blocks, depths, candidates = 200, 4, 5
    logprobs = (2 * torch.randn(blocks, depths, candidates)).log_softmax(dim=-1)
    tokens = torch.stack([torch.randperm(candidates) for _ in range(blocks * depths)]).view(blocks, depths, candidates)
    pairs = torch.randn(blocks, depths - 1, candidates, candidates) if pairwise else None
    scores = DraftScores(logprobs, tokens, pairs)
    labels = torch.randint(candidates, (blocks, depths))
    labels[::7, 2:] = -1  # the text ended
    for tree in (pack_chain(scores, depths), pack(scores, 7), pack(scores, 31)):
        found = accepted(tree, labels)
        for row in range(blocks):
            prefixes = _prefixes(tree, row)
            path = tuple(labels[row].tolist())
            assert int(found[row]) == max((d for d in range(1, depths + 1) if path[:d] in prefixes), default=0)
        assert 0 < int(found.sum()) < blocks * depths
