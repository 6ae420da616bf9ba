"""Who holds the pages of the KV pool: references, the prefix cache over whole pages, and eviction.

A page is *free*, *referenced* by one or more requests, or *idle*: cached under a key and referenced by nobody, to be
taken over by a request with the same prefix or evicted, the least recently used first. Nothing here knows tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from cast_ray.errors import EngineError

# Idle pages evicted at once, if there are many: pages of one request lie side by side, and so do the freed ones.
EVICTED_AT_ONCE = 32


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The identity of a whole page: its own tokens and, through the key of the page before it, all before them."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Hands out pages, a consecutive run where there is one: attention over such a run needs no gather.

    dropped: pages whose content is void since the list was last emptied. Who keeps something for a page by its number
    must forget it before the page is written again.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.evictions = 0
        self.dropped: list[int] = []
        self._free = np.ones(num_pages, dtype=bool)
        self._references = np.zeros(num_pages, dtype=np.int64)
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # in order of use, the least recent first

    @property
    def num_available(self) -> int:
        """Pages that can be had: free, or idle and evictable."""
        return self.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Cached pages that no request references."""
        return len(self._idle)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages with one reference each, evicting idle ones where too few are free.

        after: the page that they are to follow if possible. EngineError when there are too few: the scheduler asks
        `num_available` first.
        """
        if count > self.num_available:
            raise EngineError(f"{count} KV pages asked for and {self.num_available} of {self.num_pages} available")
        if count > self.num_free:
            self._evict(max(count - self.num_free, min(EVICTED_AT_ONCE, len(self._idle) // 4)))
        pages = self._place(count, after)
        self._free[pages] = False
        self._references[pages] = 1
        self.num_free -= count
        return pages.tolist()

    def release(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page. Giving up more than there are is an error: another may own the page."""
        # The end of a sequence is the first to be evicted: what lies behind a lost page cannot be found any more.
        for page in reversed(pages):
            if self._references[page] <= 0:
                raise EngineError(f"KV page {page} freed twice")
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._drop(page)

    def lookup(self, key: bytes) -> int | None:
        """The cached page of this key."""
        return self._page_of.get(key)

    def acquire(self, page: int) -> None:
        """One more reference to a cached page."""
        self._idle.pop(page, None)
        self._references[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether somebody references the page."""
        return bool(self._references[page])

    def is_cached(self, page: int) -> bool:
        """Whether the page can be found by a key."""
        return page in self._key_of

    def publish(self, key: bytes, page: int) -> None:
        """Make a whole, referenced page of committed tokens findable, unless page or key are in the cache already."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Every page is free, idle, or referenced exactly as often as it is in `owned`; EngineError otherwise."""
        owners = np.zeros(self.num_pages, dtype=np.int64)
        for pages in owned:
            np.add.at(owners, np.asarray(pages, dtype=np.int64), 1)
        idle = np.zeros(self.num_pages, dtype=np.int64)
        idle[list(self._idle)] = 1
        wrong = np.flatnonzero((owners != self._references) | (self._free + idle + (owners > 0) != 1))
        if wrong.size:
            raise EngineError(f"KV pages lost or owned wrongly: {wrong[:10].tolist()}")
        if self.num_free != int(self._free.sum()):
            raise EngineError(f"{self.num_free} KV pages counted as free, {int(self._free.sum())} are")
        if {page: key for key, page in self._page_of.items()} != self._key_of or not self._idle.keys() <= set(
            self._key_of
        ):
            raise EngineError("the prefix cache's keys and pages contradict each other")
        if self._free[list(self._key_of)].any():
            raise EngineError("the prefix cache holds free KV pages")

    def _evict(self, count: int) -> None:
        for page in list(self._idle)[:count]:
            del self._idle[page]
            del self._page_of[self._key_of.pop(page)]
            self._drop(page)
            self.evictions += 1

    def _drop(self, page: int) -> None:
        self._free[page] = True
        self.num_free += 1
        self.dropped.append(page)

    def _place(self, count: int, after: int | None) -> np.ndarray:
        """Free pages `[count]`: those right after `after`, else amid the longest run, else any.

        Amid, because requests grow: room is left to the one that ends where the run begins, and behind this one.
        """
        if after is not None and self._free[after + 1 : after + 1 + count].sum() == count:
            return np.arange(after + 1, after + 1 + count)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free, [False])).astype(np.int8)))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        longest = int(lengths.argmax()) if lengths.size else 0
        if not lengths.size or lengths[longest] < count:
            return np.flatnonzero(self._free)[:count]
        start = int(starts[longest])
        if start:
            start += (int(lengths[longest]) - count) // 2
        return np.arange(start, start + count)
