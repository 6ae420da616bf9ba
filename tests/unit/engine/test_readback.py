"""A round's results come to the host in one copy, and whole."""

from __future__ import annotations

import torch

from cast_ray.engine.readback import read_back
from cast_ray.models.graph_safety import Watch


def test_all_parts_come_back_as_they_were_in_one_copy() -> None:
    lengths = torch.tensor([3, 1, 2])
    tokens = torch.tensor([[5, 6, 7], [1 << 40, 0, 0], [-2, 9, 0]])
    masses = torch.tensor([[0.25, -1.5], [0.0, 3e-30], [float("inf"), 1.0]])
    with Watch() as watch:
        found = read_back(lengths=lengths, tokens=tokens, masses=masses, none=tokens[:, :0], right=lengths > 1)
    assert sum(watch.reads.values()) == 1
    assert found["lengths"].equal(lengths)
    assert found["tokens"].equal(tokens)
    assert found["masses"].equal(masses)
    assert found["none"].shape == (3, 0)
    assert found["right"].tolist() == [1, 0, 1]
