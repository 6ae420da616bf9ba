"""Every page is free, idle or referenced, through any schedule; runs are preferred, the long unused evicted."""

from __future__ import annotations

import random

import pytest

from cast_ray.errors import EngineError
from cast_ray.models.pages import PagePool, page_key


def test_no_page_is_lost_or_owned_wrongly_through_any_schedule() -> None:
    rng = random.Random(0)
    pool = PagePool(50)
    owned: list[list[int]] = []
    keys = 0
    for _ in range(2000):
        what = rng.random()
        if owned and what < 0.4:
            pool.release(owned.pop(rng.randrange(len(owned))))
        elif owned and what < 0.6:
            keys += 1
            pool.publish(b"%d" % keys, rng.choice(rng.choice(owned)))
        elif keys and what < 0.75:
            page = pool.lookup(b"%d" % rng.randrange(1, keys + 1))
            if page is not None:
                pool.acquire(page)
                owned.append([page])
        elif (count := rng.randrange(1, 12)) <= pool.num_available:
            owned.append(pool.allocate(count, rng.choice([None, rng.randrange(50)])))
        pool.check_integrity(owned)
    assert pool.evictions > 20


def test_a_consecutive_run_is_preferred_and_followed() -> None:
    pool = PagePool(12)
    first = pool.allocate(2)
    assert first == [0, 1]
    amid = pool.allocate(2)
    assert amid == [6, 7]  # room is left behind both
    assert pool.allocate(2, after=first[-1]) == [2, 3]
    assert pool.allocate(1, after=amid[-1]) == [8]
    pool.release(amid)
    assert sorted(pool.allocate(4)) == [4, 5, 6, 7]


def test_scattered_pages_are_used_where_no_run_is_long_enough() -> None:
    pool = PagePool(6)
    pages = pool.allocate(6)
    pool.release(pages[::2])
    assert pool.allocate(3) == [0, 2, 4]


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pool = PagePool(6)
    old, new = pool.allocate(3), pool.allocate(3)
    for page in (*old, *new):
        pool.publish(b"%d" % page, page)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_available) == (0, 6)
    pool.acquire(old[0])  # used again: the most recent now
    pool.release(old[:1])
    taken = pool.allocate(2)
    assert sorted(taken) == sorted(old[1:])
    assert sorted(pool.dropped) == sorted(taken)
    assert [pool.lookup(b"%d" % page) for page in old] == [old[0], None, None]
    assert pool.allocate(1) == [new[2]]


def test_a_page_is_free_only_when_its_last_reference_goes() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)
    pool.publish(b"k", page[0])
    pool.acquire(page[0])
    pool.release(page)
    assert (pool.num_available, pool.num_idle) == (1, 0)
    pool.release(page)
    assert (pool.num_available, pool.num_idle) == (2, 1)


def test_misuse_is_an_error() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    with pytest.raises(EngineError, match="2 KV pages asked for and 1 of 4 available"):
        pool.allocate(2)
    with pytest.raises(EngineError, match="lost or owned wrongly: \\[0\\]"):
        pool.check_integrity([pages[1:]])
    with pytest.raises(EngineError, match="lost or owned wrongly"):
        pool.check_integrity([pages, pages[:1]])
    pool.release(pages)
    with pytest.raises(EngineError, match="freed twice"):
        pool.release(pages[:1])


def test_a_key_stands_for_all_tokens_up_to_its_page() -> None:
    first, other = page_key(b"", [1, 2, 3, 4]), page_key(b"", [1, 2, 3, 5])
    assert page_key(first, [7] * 4) == page_key(page_key(b"", [1, 2, 3, 4]), [7] * 4)
    assert len({first, other, page_key(first, [7] * 4), page_key(other, [7] * 4), page_key(b"", [7] * 4)}) == 5
