"""Trees as rows of a forward and back, without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from cast_ray.models.flatten import Roots, flatten_trees
from cast_ray.models.graph_safety import Watch
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree

PAGE = 4


def trees(batch: int, nodes: int) -> tuple[Roots, CandidateTree]:
    torch.manual_seed(batch + nodes)
    scores = torch.randn(batch, 4, 6).log_softmax(-1)
    tree = pack(DraftScores(scores, torch.arange(6).expand(batch, 4, 6).contiguous()), nodes)
    contexts = [3 * b + 1 for b in range(batch)]
    tables = torch.randperm(batch * 8).view(batch, 8)
    return Roots(torch.randint(6, (batch,)), torch.tensor(contexts), contexts, tables), tree


@pytest.mark.parametrize("widths", [[5], [0, 7, 3], [4, 4], [1, 0, 0, 6], [2, 6, 6]])
def test_rows_are_the_roots_and_nodes_request_by_request(widths: list[int]) -> None:
    roots, tree = trees(len(widths), max(widths))
    with Watch() as watch:
        rows = flatten_trees(roots, tree, widths, PAGE, 400)
        back = rows.unflatten(rows.tokens)
    assert not watch.reads
    assert not watch.uploads
    row = 0
    for b, width in enumerate(widths):
        assert rows.starts[b] == row
        for node in range(-1, width):
            token = roots.tokens[b] if node < 0 else tree.tokens[b, node]
            depth = 0 if node < 0 else int(tree.depths[b, node])
            place = roots.lengths[b] + node + 1
            assert rows.tokens[row] == token
            assert rows.request[row] == b
            assert back[b, node + 1] == token
            assert rows.positions[row] == roots.lengths[b] + depth
            assert rows.slots[row] == roots.tables[b, place // PAGE] * PAGE + place % PAGE
            row += 1
        assert not back[b, width + 1 :].any()
    assert row == len(rows.tokens) == rows.group.rows
