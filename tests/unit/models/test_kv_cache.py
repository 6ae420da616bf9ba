"""Pages are handed out once and come back; slots follow block tables; moves read before they write."""

from __future__ import annotations

import random

import pytest
import torch

from cast_ray.errors import EngineError
from cast_ray.models.kv_cache import KVCache, PageAllocator, slots_of


def test_pages_are_owned_once_through_any_schedule() -> None:
    rng = random.Random(0)
    allocator = PageAllocator(50)
    owned: list[list[int]] = []
    for _ in range(500):
        if owned and rng.random() < 0.5:
            allocator.free(owned.pop(rng.randrange(len(owned))))
        elif (count := rng.randrange(1, 12)) <= allocator.num_free:
            owned.append(allocator.allocate(count))
        allocator.check_integrity(owned)
    assert allocator.num_free == 50 - sum(map(len, owned))


def test_a_run_of_consecutive_pages_is_preferred() -> None:
    allocator = PageAllocator(10)
    first, second = allocator.allocate(3), allocator.allocate(4)
    allocator.free(first)
    assert second == [3, 4, 5, 6]
    assert allocator.allocate(2) == [0, 1]
    assert allocator.allocate(3) == [7, 8, 9]
    allocator.free(second)
    assert allocator.allocate(5) == [2, 3, 4, 5, 6]


def test_scattered_pages_are_used_where_no_run_is_long_enough() -> None:
    allocator = PageAllocator(6)
    pages = [allocator.allocate(1) for _ in range(6)]
    for page in pages[::2]:
        allocator.free(page)
    assert allocator.allocate(3) == [0, 2, 4]


def test_misuse_is_an_error() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    with pytest.raises(EngineError, match="2 KV pages asked for and 1 of 4 free"):
        allocator.allocate(2)
    with pytest.raises(EngineError, match="lost or owned twice: \\[0\\]"):
        allocator.check_integrity([pages[1:]])
    with pytest.raises(EngineError, match="lost or owned twice"):
        allocator.check_integrity([pages, pages[:1]])
    allocator.free(pages)
    with pytest.raises(EngineError, match="freed twice"):
        allocator.free(pages[:1])


def test_slots_follow_the_block_table() -> None:
    tables = torch.tensor([[7, 2, 5], [0, 1, 9]])
    index = torch.tensor([[0, 3, 4, 11], [8, 1, 5, 2]])
    assert slots_of(tables, index, 4).tolist() == [[28, 31, 8, 23], [36, 1, 5, 2]]


def test_a_move_reads_every_source_before_it_writes() -> None:
    cache = KVCache(2, 1, 3, slots=6, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.copy_(torch.arange(6.0).view(1, 1, 6, 1, 1).expand_as(cache.data))
    cache.move(torch.tensor([2, 1, 4]), torch.tensor([1, 2, 3]))
    assert cache.data[1, 1, :, 0, 2].tolist() == [0, 2, 1, 4, 4, 5]
