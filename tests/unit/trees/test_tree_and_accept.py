"""What a verified tree sees of itself, and what of it is committed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_ray.errors import ConfigError
from cast_ray.trees.accept import accept
from cast_ray.trees.pack import pack
from cast_ray.trees.tree import ancestor_mask, no_tree
from tests.unit.trees.slow_trees import STYLES, path_to, random_scores, walk

SHAPES = {
    "seed": st.integers(0, 2**31),
    "batch": st.integers(1, 6),
    "depths": st.integers(1, 5),
    "candidates": st.integers(1, 4),
    "nodes": st.integers(1, 24),
    "style": st.sampled_from(STYLES),
    "width": st.integers(0, 24),
}


@settings(max_examples=150, deadline=None)
@given(**SHAPES)
def test_a_node_sees_itself_its_ancestors_and_the_root(
    seed: int, batch: int, depths: int, candidates: int, nodes: int, style: str, width: int
) -> None:
    tree = pack(random_scores(seed, batch, depths, candidates, style), nodes)
    width = min(width, nodes)
    mask = ancestor_mask(tree, width)
    assert mask.shape == (batch, width + 1, width + 1)
    assert mask.dtype == torch.bool
    for request in range(batch):
        for row in range(width + 1):
            seen = {0, row} | {node + 1 for node in path_to(tree, request, row - 1)}
            assert set(mask[request, row].nonzero()[:, 0].tolist()) == seen


@settings(max_examples=250, deadline=None)
@given(**SHAPES)
def test_the_accepted_path_is_the_walk_of_the_target_through_the_tree(
    seed: int, batch: int, depths: int, candidates: int, nodes: int, style: str, width: int
) -> None:
    tree = pack(random_scores(seed, batch, depths, candidates, style), nodes).slice(width)
    width = tree.max_nodes
    generator = torch.Generator().manual_seed(seed)
    # Ids lie below `candidates`, so that targets often agree with the tree.
    target = torch.randint(candidates, (batch, width + 1), generator=generator)
    widths = torch.randint(width + 1, (batch,), generator=generator)
    accepted = accept(target, tree, widths, ancestor_mask(tree, width))

    assert accepted.path.shape == accepted.tokens.shape == (batch, tree.max_depth + 1)
    for request in range(batch):
        rows, committed = walk(target[request].tolist(), tree, request, int(widths[request]))
        length = int(accepted.lengths[request])
        assert accepted.path[request, :length].tolist() == rows
        assert accepted.tokens[request, :length].tolist() == committed
        assert not accepted.path[request, length:].any()
        assert not accepted.tokens[request, length:].any()


def test_a_target_that_follows_the_drafter_is_accepted_to_the_end() -> None:
    scores = random_scores(1, 2, 6, 1, "smooth", vocab=50)
    tree = pack(scores, 6)
    bonus = torch.tensor([[7], [8]])
    target = torch.cat([scores.token_ids[:, :, 0], bonus], dim=1)
    accepted = accept(target, tree, torch.tensor([6, 3]), ancestor_mask(tree, 6))
    assert accepted.lengths.tolist() == [7, 4]
    assert accepted.path.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0, 0, 0]]
    assert accepted.tokens[0].tolist() == target[0].tolist()


def test_padding_is_never_accepted_even_where_the_target_says_token_zero() -> None:
    tree = pack(random_scores(0, 1, 1, 1, "smooth", vocab=9), 4)
    accepted = accept(torch.zeros(1, 5, dtype=torch.int64), tree, torch.tensor([4]), ancestor_mask(tree, 4))
    drafted_zero = int(tree.tokens[0, 0]) == 0
    assert accepted.lengths.tolist() == [2 if drafted_zero else 1]


def test_without_a_tree_the_round_commits_the_targets_own_token() -> None:
    tree = no_tree(3, torch.device("cpu"))
    accepted = accept(torch.tensor([[4], [5], [6]]), tree, torch.zeros(3, dtype=torch.int64), ancestor_mask(tree, 0))
    assert accepted.lengths.tolist() == [1, 1, 1]
    assert accepted.path.tolist() == [[0], [0], [0]]
    assert accepted.tokens.tolist() == [[4], [5], [6]]


def test_a_slice_shares_the_memory_of_its_tree() -> None:
    tree = pack(random_scores(0, 2, 3, 4, "smooth"), 20)
    assert tree.slice(5).tokens.data_ptr() == tree.tokens.data_ptr()
    assert tree.slice(50).max_nodes == 20
    with pytest.raises(ConfigError, match="width=-1"):
        tree.slice(-1)
