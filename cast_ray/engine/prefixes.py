"""Which pages requests share: whole pages of committed tokens, each computed once.

Requests with one prefix that run at the same time follow each other: the first that wants a page leads it, the others
wait until it is there. A page that is not whole is never shared, so nobody writes into what another reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from cast_ray.engine.sequence import Sequence
from cast_ray.models.pages import PagePool


class Prefixes:
    """See the module. `enabled` False shares nothing."""

    def __init__(self, pool: PagePool, page_size: int, enabled: bool) -> None:
        self.pool = pool
        self.page_size = page_size
        self.enabled = enabled
        self.tokens_reused = 0
        self._leaders: dict[bytes, Sequence] = {}  # of pages that are not there yet

    def claim(self, sequence: Sequence) -> None:
        """Lead every page of the sequence's tokens, from where it stands, that no better one leads."""
        for page in self._pages_ahead(sequence):
            self._leads(sequence, page)

    def disclaim(self, sequence: Sequence) -> None:
        """Lead nothing any more."""
        for key in sequence.keys:
            if self._leaders.get(key) is sequence:
                del self._leaders[key]

    def adopt(self, sequence: Sequence) -> Iterator[int]:
        """Cached pages that come next, each referenced for the sequence; the caller puts them into its table."""
        # Having pages beyond what is cached means that it computes them itself.
        for page in self._pages_ahead(sequence) if len(sequence.pages) * self.page_size == sequence.cached else ():
            cached = self.pool.lookup(sequence.key(page, self.page_size))
            if cached is None:
                return
            self.pool.acquire(cached)
            self._release_lead(sequence, page)
            sequence.published += 1
            self.tokens_reused += self.page_size
            yield cached

    def reach(self, sequence: Sequence) -> int:
        """Tokens up to which the sequence computes for itself now; those it has cached already when it must wait."""
        last = len(sequence.tokens) - 1
        if not self.enabled:
            return last
        own = len(sequence.pages)
        if own * self.page_size > sequence.cached:
            # It began on these pages; those behind them are looked at when it gets there.
            return min(last, own * self.page_size)
        for page in self._pages_ahead(sequence):
            if not self._leads(sequence, page) or self.pool.lookup(sequence.keys[page]) is not None:
                return page * self.page_size
        return last

    def publish(self, sequence: Sequence) -> None:
        """Offer the pages that have become whole to the cache."""
        if not self.enabled:
            return
        for page in range(sequence.published, sequence.cached // self.page_size):
            self.pool.publish(sequence.key(page, self.page_size), sequence.pages[page])
            self._release_lead(sequence, page)
            sequence.published += 1

    def shared_ahead(self, sequence: Sequence) -> int:
        """Of the pages that the sequence lacks, those that cost the pool nothing: in use already, or led by another."""
        shared = 0
        first = len(sequence.pages)
        for page in self._pages_ahead(sequence):
            if page < first:
                continue
            key = sequence.key(page, self.page_size)
            cached = self.pool.lookup(key)
            leader = self._leaders.get(key)
            shared += self.pool.is_shared(cached) if cached is not None else leader not in (None, sequence)
        return shared

    def _leads(self, sequence: Sequence, page: int) -> bool:
        """Whether the sequence leads the page; it takes the lead from one that comes after it and has not begun there.

        Who waits, waits for one that is computing: no two can wait for each other.
        """
        key = sequence.key(page, self.page_size)
        leader = self._leaders.get(key)
        if leader is None or (sequence.rank < leader.rank and len(leader.pages) <= page):
            self._leaders[key] = leader = sequence
        return leader is sequence

    def _pages_ahead(self, sequence: Sequence) -> range:
        """Whole pages of its tokens that are not in the cache. The root is never among them: it is yet to be fed."""
        if not self.enabled or (sequence.emitting is not None and sequence.emitting.missing_prompt_logprobs):
            return range(0)
        return range(sequence.cached // self.page_size, (len(sequence.tokens) - 1) // self.page_size)

    def _release_lead(self, sequence: Sequence, page: int) -> None:
        key = sequence.keys[page]
        if self._leaders.get(key) is sequence:
            del self._leaders[key]
