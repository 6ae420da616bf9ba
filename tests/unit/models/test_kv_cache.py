"""Slots follow block tables; moves read before they write."""

from __future__ import annotations

import torch

from cast_ray.models.kv_cache import KVCache, slots_of


def test_slots_follow_the_block_table() -> None:
    tables = torch.tensor([[7, 2, 5], [0, 1, 9]])
    index = torch.tensor([[0, 3, 4, 11], [8, 1, 5, 2]])
    assert slots_of(tables, index, 4).tolist() == [[28, 31, 8, 23], [36, 1, 5, 2]]


def test_a_move_reads_every_source_before_it_writes() -> None:
    cache = KVCache(2, 1, 3, slots=6, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.copy_(torch.arange(6.0).view(1, 1, 6, 1, 1).expand_as(cache.data))
    cache.move(torch.tensor([2, 1, 4]), torch.tensor([1, 2, 3]))
    assert cache.data[1, 1, :, 0, 2].tolist() == [0, 2, 1, 4, 4, 5]
