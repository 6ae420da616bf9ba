"""Edited trees are trees: closed under parents, sorted by mass, with the paths that they should have."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_ray.trees.edit import Nodes, graft, heaviest, read, replace, trunk
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree, no_tree


def random_tree(seed: int, batch: int = 3, nodes: int = 12) -> CandidateTree:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, 4, 5, generator=generator)
    ids = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(batch * 4)]).view(batch, 4, 5)
    return pack(DraftScores(logits.log_softmax(2), ids), nodes)


def prefixes(tree: CandidateTree, b: int) -> list[tuple[tuple[int, ...], float]]:
    """Every node as (its tokens from the root, mass), in order."""
    out: list[tuple[int, ...]] = []
    for i in range(int(tree.counts[b])):
        parent = int(tree.parents[b, i])
        assert parent < i
        out.append((*(() if parent < 0 else out[parent]), int(tree.tokens[b, i])))
        assert len(out[-1]) == int(tree.depths[b, i])
    return [(path, float(tree.masses[b, i])) for i, path in enumerate(out)]


def test_what_is_read_and_put_back_is_the_same_tree() -> None:
    tree = random_tree(4)
    back = replace(tree, read(tree, [0, 2]))
    for b in range(3):
        assert prefixes(back, b) == prefixes(tree, b)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999), st.lists(st.integers(0, 8), max_size=6))
def test_a_grafted_tree_has_the_certain_stretch_first_and_all_that_was_drafted(seed: int, certain: list[int]) -> None:
    tree = random_tree(seed)
    drafted = read(tree, [1])[1]
    nodes = graft(drafted, certain)
    out = replace(tree, {1: nodes})
    found = dict(prefixes(out, 1))
    assert [mass for _, mass in prefixes(out, 1)] == sorted(found.values(), reverse=True)
    chain = [tuple(certain[: i + 1]) for i in range(len(certain))]
    assert set(found) == {path for path, _ in prefixes(tree, 1)} | set(chain)
    assert all(found[path] == 1 for path in chain)
    # Behind the stretch, the share of each node in its parent's mass is what the drafter gave.
    before = dict(prefixes(tree, 1))
    for path, mass in found.items():
        if path in before and path not in chain and path[:-1]:
            torch.testing.assert_close(mass / found[path[:-1]], before[path] / before[path[:-1]], rtol=1e-4, atol=0)
    for most in (0, 1, 5):
        some = replace(tree, {1: heaviest(nodes, most)})
        assert prefixes(some, 1) == prefixes(out, 1)[:most]


def test_a_replaced_tree_stands_beside_those_that_stay() -> None:
    for tree in (random_tree(1), no_tree(3, torch.device("cpu"))):
        nodes = Nodes([7] * 20, list(range(-1, 19)), [1.0] * 20)
        out = replace(tree, {1: nodes})
        assert prefixes(out, 1) == [((7,) * length, 1.0) for length in range(1, 21)]
        for b in (0, 2):
            assert prefixes(out, b) == prefixes(tree, b)
        assert out.max_depth == 20
        assert replace(tree, {}) is tree


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_trunk_is_the_path_of_heaviest_children(seed: int) -> None:
    nodes = read(random_tree(seed), [0])[0]
    path = trunk(nodes)
    assert path.parents == list(range(-1, len(path) - 1))
    here, expected = -1, []
    while children := [i for i, parent in enumerate(nodes.parents) if parent == here]:
        here = max(children, key=lambda i: (nodes.masses[i], -i))
        expected.append((nodes.tokens[here], nodes.masses[here]))
    assert list(zip(path.tokens, path.masses, strict=True)) == expected
