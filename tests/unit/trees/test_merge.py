"""Trees of several sources as one: equal prefixes are one node, families keep to their parents, slices are trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cast_ray.trees.merge import DRAFTER, Offer, chain_of, merge
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree, ancestor_mask, no_tree

CPU = torch.device("cpu")


def offer_of(trees: list[list[tuple[int, int, float]]], source: int = 2) -> Offer:
    """From (token, parent, mass), heaviest first."""
    width = max(map(len, trees))
    out = Offer(
        tokens=np.zeros((len(trees), width), dtype=np.int64),
        parents=np.full((len(trees), width), -1),
        depths=np.zeros((len(trees), width), dtype=np.int64),
        masses=np.zeros((len(trees), width)),
        sources=np.zeros((len(trees), width), dtype=np.int64),
        counts=np.array([len(tree) for tree in trees]),
    )
    for b, tree in enumerate(trees):
        for node, (token, parent, mass) in enumerate(tree):
            out.tokens[b, node], out.parents[b, node], out.masses[b, node] = token, parent, mass
            out.depths[b, node] = 1 if parent < 0 else out.depths[b, parent] + 1
            out.sources[b, node] = source
    return out


def random_offer(rng: np.random.Generator, batch: int, nodes: int, vocab: int) -> Offer:
    trees = []
    for _ in range(batch):
        tree: list[tuple[int, int, float]] = []
        seen = {(-1, -1)}
        left = {-1: 1.0}
        for _ in range(int(rng.integers(0, nodes + 1))):
            parent = int(rng.integers(-1, len(tree)))
            token = int(rng.integers(vocab))
            if (parent, token) in seen:
                continue
            seen.add((parent, token))
            mass = left[parent] * rng.uniform(0.1, 0.9)
            left[parent] -= mass
            left[len(tree)] = mass
            tree.append((token, parent, mass))
        order = sorted(range(len(tree)), key=lambda i: -tree[i][2])
        place = {-1: -1, **{old: new for new, old in enumerate(order)}}
        trees.append([(tree[i][0], place[tree[i][1]], tree[i][2]) for i in order])
    return offer_of(trees)


def drafted(rng: np.random.Generator, batch: int, nodes: int, vocab: int) -> CandidateTree:
    logits = torch.from_numpy(rng.normal(size=(batch, 4, vocab)) * 2).float()
    ids = torch.arange(vocab).expand(batch, 4, vocab)
    return pack(DraftScores(logits.log_softmax(-1), ids), nodes)


def prefixes(tree: CandidateTree, b: int) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for node in range(int(tree.counts[b])):
        parent = int(tree.parents[b, node])
        paths.append((() if parent < 0 else paths[parent]) + (int(tree.tokens[b, node]),))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree.masses[b].tolist(), strict=False))


def check(tree: CandidateTree) -> None:
    for b in range(tree.batch):
        count = int(tree.counts[b])
        masses = tree.masses[b]
        assert (masses[1:] <= masses[:-1]).all()
        assert (tree.parents[b, :count] < torch.arange(count)).all()
        assert not masses[count:].any()
        assert (tree.parents[b, count:] == -1).all()
        families: dict[int, float] = {}
        for node in range(count):
            parent = int(tree.parents[b, node])
            families[parent] = families.get(parent, 0.0) + float(masses[node])
            assert int(tree.depths[b, node]) == (1 if parent < 0 else int(tree.depths[b, parent]) + 1)
        for parent, mass in families.items():
            assert mass <= (1.0 if parent < 0 else float(masses[parent])) * (1 + 1e-5)
    assert int(tree.depths.max()) <= tree.max_depth if tree.depths.numel() else True


def test_equal_prefixes_are_one_node_and_get_more_than_either_gave_them() -> None:
    logprobs = torch.tensor([[[0.6, 0.3], [0.5, 0.4]]]).log()
    tree = pack(DraftScores(logprobs, torch.tensor([[[7, 8], [5, 6]]])), 6)
    # The other is half sure of 7, then sure of 9; the drafter knows no 9 there.
    merged = merge(tree, offer_of([[(7, -1, 0.5), (9, 0, 0.4)]]), 8)
    check(merged)
    masses = prefixes(merged, 0)
    assert masses[(7,)] == pytest.approx(0.5 + 0.5 * 0.6)
    assert masses[(8,)] == pytest.approx(0.5 * 0.3)
    assert masses[(7, 9)] == pytest.approx(0.8 * 0.8)
    assert masses[(7, 5)] == pytest.approx(0.8 * 0.2 * 0.5)
    assert masses[(8, 5)] == pytest.approx(0.15 * 0.5)
    assert set(masses) == {(7,), (8,), (7, 9), (7, 5), (7, 6), (8, 5), (8, 6)}
    assert merged.origins is not None
    found = {path: n for n, path in enumerate(masses)}
    assert merged.origins.sources[0, found[(7,)]] == merged.origins.sources[0, found[(7, 9)]] == 2
    assert merged.origins.sources[0, found[(8,)]] == DRAFTER
    assert merged.origins.drafter_masses[0, found[(7,)]] == pytest.approx(0.6)
    assert merged.origins.drafter_masses[0, found[(7, 9)]] == 0


def test_merged_trees_are_trees_and_hold_the_heaviest_of_both() -> None:
    rng = np.random.default_rng(0)
    for trial in range(30):
        batch, vocab = int(rng.integers(1, 5)), int(rng.integers(2, 8))
        tree, offer = drafted(rng, batch, 15, vocab), random_offer(rng, batch, 12, vocab)
        whole = merge(tree, offer, 64)
        check(whole)
        for b in range(batch):
            both = prefixes(tree, b).keys() | prefixes(offer.to_tree(CPU), b).keys()
            assert prefixes(whole, b).keys() == both, trial
        cut = merge(tree, offer, 10)
        check(cut)
        assert cut.max_nodes <= 10
        assert torch.equal(cut.masses, whole.masses[:, : cut.max_nodes])
        for width in (0, 1, 5):
            check(cut.slice(width))


def test_a_request_without_an_offer_keeps_the_drafters_tree() -> None:
    rng = np.random.default_rng(1)
    tree = drafted(rng, 2, 12, 5)
    merged = merge(tree, offer_of([[], [(0, -1, 0.9)]]), 12)
    assert prefixes(merged, 0) == pytest.approx(prefixes(tree, 0))
    assert merged.masses[1, 0] >= 0.9


def test_an_offer_alone_is_a_tree_that_knows_its_sources() -> None:
    offer = offer_of([[(1, -1, 0.9), (2, 0, 0.8), (3, -1, 0.05)], []], source=3)
    tree = offer.to_tree(CPU)
    check(tree)
    assert tree.origins is not None
    assert tree.origins.sources.tolist() == [[3, 3, 3], [0, 0, 0]]
    assert not tree.origins.drafter_masses.any()
    assert tree.slice(2).origins.sources.shape == (2, 2)  # type: ignore[union-attr]


def test_the_chain_of_a_tree_is_its_likeliest_path() -> None:
    offer = offer_of(
        [[(1, -1, 0.5), (2, -1, 0.4), (3, 1, 0.39), (4, 0, 0.3), (5, 0, 0.1), (6, 3, 0.05)], [(9, -1, 0.2)]]
    )
    chain = chain_of(offer.to_tree(CPU))
    assert chain.tokens.tolist() == [[1, 4, 6], [9, 0, 0]]
    assert chain.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    assert chain.depths.tolist() == [[1, 2, 3], [1, 0, 0]]
    assert chain.counts.tolist() == [3, 1]
    assert chain.max_depth == 3
    empty = no_tree(2, CPU)
    assert chain_of(empty) is empty


def test_the_mask_of_a_deep_tree_is_that_of_a_walk_to_the_root() -> None:
    rng = np.random.default_rng(4)
    trees = []
    for _ in range(3):
        tree = [(0, -1, 1.0)]
        for node in range(1, 60):
            # Mostly a chain, so that it is deep.
            tree.append((node, node - 1 if rng.random() < 0.8 else int(rng.integers(-1, node)), 1.0 / (node + 1)))
        trees.append(tree)
    tree = offer_of(trees).to_tree(CPU)
    for width in (0, 1, 17, 60):
        mask = ancestor_mask(tree, width)
        for b in range(3):
            for row in range(width + 1):
                seen, at = {row}, row
                while at:
                    at = int(tree.parents[b, at - 1]) + 1
                    seen.add(at)
                assert set(mask[b, row].nonzero()[:, 0].tolist()) == seen
