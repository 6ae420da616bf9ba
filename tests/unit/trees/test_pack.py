"""What `pack` promises: exactly the heaviest prefixes, sorted, and closed at every width."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_ray.errors import CastRayError, ConfigError, DrafterError
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree
from tests.unit.trees.slow_trees import STYLES, best_first, path_to, random_scores

SHAPES = {
    "seed": st.integers(0, 2**31),
    "batch": st.integers(1, 8),
    "depths": st.integers(1, 5),
    "candidates": st.integers(1, 6),
    "nodes": st.integers(1, 40),
    "style": st.sampled_from(STYLES),
}


def check_tree(tree: CandidateTree, scores: DraftScores, nodes: int) -> None:
    """Everything that holds of any packed tree, against the slow reference."""
    assert tree.tokens.shape == tree.parents.shape == tree.depths.shape == tree.masses.shape == (tree.batch, nodes)
    assert tree.masses.dtype == torch.float32
    assert tree.tokens.dtype == tree.parents.dtype == tree.depths.dtype == tree.counts.dtype == torch.int64
    for request in range(tree.batch):
        found = best_first(scores, request, nodes + 1)
        wanted = found[:nodes]
        count = int(tree.counts[request])
        assert count == len(wanted)
        np.testing.assert_allclose(
            tree.masses[request, :count].numpy(), [math.exp(mass) for mass, _ in wanted], rtol=1e-4, atol=1e-37
        )
        paths = []
        for node in range(count):
            way = path_to(tree, request, node)
            assert int(tree.depths[request, node]) == len(way) <= tree.max_depth
            paths.append([int(tree.tokens[request, step]) for step in way])
        assert len({tuple(path) for path in paths}) == count, "a prefix appears twice"
        gaps = -np.diff([mass for mass, _ in found])
        if (gaps > 1e-4).all():
            ids = scores.token_ids[request]
            assert paths == [[int(ids[d, k]) for d, k in enumerate(path)] for _, path in wanted]


def check_order(tree: CandidateTree) -> None:
    assert (tree.masses[:, 1:] <= tree.masses[:, :-1]).all()
    index = torch.arange(tree.max_nodes)
    assert (tree.parents < index).all(), "a slice would cut a parent off"
    real = index < tree.counts[:, None]
    parent_depths = torch.nn.functional.pad(tree.depths, (1, 0)).gather(1, tree.parents + 1)
    assert (tree.depths == parent_depths + 1)[real].all()
    for padding, value in ((tree.tokens, 0), (tree.parents, -1), (tree.depths, 0), (tree.masses, 0)):
        assert (padding[~real] == value).all()


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_the_tree_holds_exactly_the_heaviest_prefixes(
    seed: int, batch: int, depths: int, candidates: int, nodes: int, style: str
) -> None:
    scores = random_scores(seed, batch, depths, candidates, style)
    tree = pack(scores, nodes)
    check_tree(tree, scores, nodes)
    check_order(tree)


@settings(max_examples=200, deadline=None)
@given(**SHAPES)
def test_the_tree_is_exact_with_pairwise_scores(
    seed: int, batch: int, depths: int, candidates: int, nodes: int, style: str
) -> None:
    scores = random_scores(seed, batch, depths, candidates, style, pairwise=True)
    tree = pack(scores, nodes)
    check_tree(tree, scores, nodes)
    check_order(tree)


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize(("depths", "candidates", "nodes"), [(7, 32, 63), (15, 8, 200), (3, 64, 16)])
def test_the_tree_is_exact_at_working_sizes(depths: int, candidates: int, nodes: int, pairwise: bool) -> None:
    for seed, style in enumerate(STYLES):
        scores = random_scores(seed, 4, depths, candidates, style, pairwise)
        tree = pack(scores, nodes)
        check_tree(tree, scores, nodes)
        check_order(tree)


@settings(max_examples=100, deadline=None)
@given(width=st.integers(1, 40), pairwise=st.booleans(), **SHAPES)
def test_a_slice_is_the_tree_packed_narrower(
    seed: int, batch: int, depths: int, candidates: int, nodes: int, style: str, width: int, pairwise: bool
) -> None:
    scores = random_scores(seed, batch, depths, candidates, style, pairwise)
    width = min(width, nodes)
    sliced, narrow = pack(scores, nodes).slice(width), pack(scores, width)
    for name in ("tokens", "parents", "depths", "masses", "counts"):
        assert torch.equal(getattr(sliced, name), getattr(narrow, name)), name
    assert sliced.max_depth == narrow.max_depth


def test_a_request_gets_the_same_tree_in_any_batch() -> None:
    for pairwise in (False, True):
        scores = random_scores(3, 16, 5, 8, "quantised", pairwise)
        together = pack(scores, 33)
        for request in range(16):
            own = slice(request, request + 1)
            pairs = scores.pairwise[own] if scores.pairwise is not None else None
            alone = pack(DraftScores(scores.logprobs[own], scores.token_ids[own], pairs), 33)
            assert torch.equal(together.tokens[own], alone.tokens)
            assert torch.equal(together.parents[own], alone.parents)


def test_ties_go_to_the_ancestor_then_to_the_earlier_parent() -> None:
    logprobs = torch.tensor([[[1.0, 0.5], [0.5, 1.0], [1.0, 0.5]]]).log()
    tree = pack(DraftScores(logprobs, torch.tensor([[[10, 11], [20, 21], [30, 31]]])), 7)
    masses = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert tree.masses[0].tolist() == pytest.approx(masses)
    assert tree.depths[0].tolist() == [1, 2, 3, 1, 2, 2, 3]
    assert tree.tokens[0].tolist() == [10, 21, 30, 11, 20, 21, 31]
    assert tree.parents[0].tolist() == [-1, 0, 1, -1, 0, 3, 1]


def test_one_candidate_a_depth_gives_the_chain() -> None:
    scores = random_scores(0, 3, 7, 1, "smooth", vocab=100)
    scores = DraftScores(torch.rand(3, 7, 1).log(), scores.token_ids)
    tree = pack(scores, 9)
    assert tree.counts.tolist() == [7, 7, 7]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5, -1, -1]] * 3
    assert torch.equal(tree.tokens[:, :7], scores.token_ids[:, :, 0])


def test_prefixes_too_light_for_float32_keep_their_order() -> None:
    logprobs = torch.tensor([[[-60.0, -61.0], [-62.0, -70.0], [-1.0, -2.0]]])
    tree = pack(DraftScores(logprobs, torch.tensor([[[1, 2], [3, 4], [5, 6]]])), 14)
    assert tree.counts.tolist() == [14]
    wanted = best_first(DraftScores(logprobs, torch.tensor([[[1, 2], [3, 4], [5, 6]]])), 0, 14)
    tails = [[1, 2, 3, 4, 5, 6][2 * (len(path) - 1) + path[-1]] for _, path in wanted]
    assert tree.tokens[0].tolist() == tails
    assert (tree.masses[0, 2:] == 0).all()


def test_what_may_not_be_emitted_is_no_node() -> None:
    never = -math.inf
    logprobs = torch.tensor([[[never, -1.0], [math.nan, never]], [[never, never], [-1.0, -1.0]]])
    tree = pack(DraftScores(logprobs, torch.tensor([[[1, 2], [3, 4]]] * 2)), 4)
    assert tree.counts.tolist() == [1, 0]
    assert tree.tokens.tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.isfinite(tree.masses).all()


def test_probabilities_above_one_do_not_lift_a_child_over_its_parent() -> None:
    tree = pack(DraftScores(torch.full((1, 4, 2), 1e-3), torch.tensor([[[0, 1]] * 4])), 20)
    check_order(tree)
    assert tree.masses.max() == 1


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_nodes=0: must be at least 1"):
        pack(random_scores(0, 1, 2, 2, "smooth"), 0)


@pytest.mark.parametrize(
    ("logprobs", "token_ids", "pairwise", "field"),
    [
        ((2, 3), (2, 3), None, "logprobs"),
        ((2, 0, 3), (2, 0, 3), None, "logprobs"),
        ((2, 3, 4), (2, 3, 5), None, "token_ids"),
        ((2, 3, 4), (2, 3, 4), (2, 3, 4, 4), "pairwise"),
    ],
)
def test_scores_that_do_not_fit_together_are_refused(
    logprobs: tuple[int, ...], token_ids: tuple[int, ...], pairwise: tuple[int, ...] | None, field: str
) -> None:
    pairs = torch.zeros(pairwise) if pairwise else None
    with pytest.raises(DrafterError, match=field) as caught:
        DraftScores(torch.zeros(logprobs), torch.zeros(token_ids, dtype=torch.int64), pairs)
    assert isinstance(caught.value, CastRayError)
