"""The optimiser: orthogonal updates for matrices, and only for those."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cast_ray.training.muon import BLOCK_ROWS, Muon, make_optimisers, orthogonalise, step_direction


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (16, 16)])
def test_singular_values_end_up_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, sizes, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    sizes = torch.linspace(1.0, 0.05, len(sizes))
    out = orthogonalise(((left * sizes) @ right)[None])[0]
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.3
    assert values.max() < 1.7
    along = (left.T @ out @ right.T).diagonal()
    assert along.min() > 0.3


def test_the_smallest_directions_of_a_gradient_count_too() -> None:
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(64, 96), full_matrices=False)
    out = orthogonalise(((left * torch.logspace(0, -2.5, 64)) @ right)[None])[0]
    along = (left.T @ out @ right.T).diagonal()
    assert along.min() > 0.3  # a three-hundredth of the largest
    assert along.max() < 1.7


@pytest.mark.parametrize("shape", [(BLOCK_ROWS + 7, 300), (3 * BLOCK_ROWS, 64), (20, 8), (BLOCK_ROWS, 200)])
def test_every_block_of_rows_is_orthogonal_in_itself(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    out = step_direction(torch.randn(shape))
    assert out.shape == shape
    for block in out.tensor_split(-(-shape[0] // BLOCK_ROWS)):
        # In proportion to its rows, whatever the shape, and no direction of it far above another.
        assert 0.6 < float(block.norm()) / len(block) ** 0.5 < 1.5
        values = torch.linalg.svdvals(block)
        assert values.max() < 5 * values.min()


def test_a_step_goes_downhill_whatever_the_gradient_s_size() -> None:
    for size in (1e-6, 1e6):
        weight = nn.Parameter(torch.zeros(8, 12))
        optimiser = Muon([weight], lr=0.1)
        goal = torch.randn(8, 12)
        (size * (weight * -goal).sum()).backward()
        optimiser.step()
        moved = weight.detach()
        assert float((moved * goal).sum()) > 0
        assert 0.02 < float(torch.linalg.matrix_norm(moved, 2)) < 0.3


def test_only_weights_of_linear_layers_go_to_muon() -> None:
    network = nn.ModuleDict({"a": nn.Linear(4, 3), "norm": nn.LayerNorm(4), "codebook": nn.Embedding(9, 4)})
    muon, adam = make_optimisers(network, 0.01, 0.1)
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(3, 4)]
    assert sum(len(group["params"]) for group in adam.param_groups) == 4
