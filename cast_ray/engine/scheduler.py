"""Which requests take part in the next step: admission, prompts cut into chunks, growth, and preemption.

Requests are ordered by priority, then arrival. Pages grow with a request; where they run out, the last in order gives
back its own and is computed again later, so the first always makes progress. It knows no model and no tensor but block
tables; who may share which page is decided in `engine.prefixes`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

import torch
from torch import Tensor

from cast_ray.engine.prefixes import Prefixes
from cast_ray.engine.sequence import Sequence
from cast_ray.errors import EngineError
from cast_ray.models.pages import PagePool
from cast_ray.transfer import upload

# Steps that a request waits before one may go ahead of its betters; also the steps between two such favours.
PATIENCE = 512


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` (exclusive) of a sequence, to be put into the cache."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """Who takes part in a step."""

    decoding: list[Sequence]
    chunks: list[Chunk]


class Scheduler:
    """See the module.

    scratch: token places kept free behind a decoding request's tokens, for the nodes of a tree or the drafter's block;
        a sequence may ask for more, up to `most_scratch`.
    tables: `[max_batch, P]` int64, the pages of each running request by its `row`.
    running, waiting: in order, the first to be served first.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        max_batch: int,
        max_context: int,
        scratch: int,
        device: torch.device,
        *,
        most_scratch: int = 0,
        share_prefixes: bool = True,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.scratch = scratch
        self.prefixes = Prefixes(pool, page_size, share_prefixes)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        columns = self.pages_for(max_context, most_scratch)
        self.tables: Tensor = torch.zeros(max_batch, columns, dtype=torch.int64, device=device)
        self._sequences: dict[str, Sequence] = {}
        self._free_rows = list(range(max_batch - 1, -1, -1))
        self._arrivals = count()
        self._step = 0
        self._favoured_at = 0
        self._changed: list[tuple[int, int, int]] = []  # (row, column, page) to be written into the tables

    def pages_for(self, length: int, scratch: int = 0) -> int:
        """Pages of a request that has grown to `length` tokens and decodes. scratch: what it asks for itself."""
        return -(-(length + max(scratch, self.scratch)) // self.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller has checked that it fits the pool alone and that its id is new."""
        sequence.arrival = next(self._arrivals)
        self._sequences[sequence.request_id] = sequence
        self._queue(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of this id, waiting or running."""
        return self._sequences.get(request_id)

    def plan(self, prompt_tokens: int) -> Plan:
        """Admit what fits, then choose: every decoding request, and prompt chunks of up to `prompt_tokens` in all."""
        self._step += 1
        self._favour()
        self._admit()
        chunks, left = [], prompt_tokens
        for sequence in list(self.running):
            if sequence.row < 0:  # preempted for one before it
                continue
            self._adopt(sequence)
            if sequence.decoding:
                self._grow(sequence, self.pages_for(len(sequence.tokens), sequence.scratch))
            elif left > 0 and (reach := self.prefixes.reach(sequence)) > sequence.cached:
                end = min(reach, sequence.cached + left)
                whole = reach == len(sequence.tokens) - 1
                pages = self.pages_for(reach + 1, sequence.scratch) if whole else reach // self.page_size
                if self._grow(sequence, pages):
                    chunks.append(Chunk(sequence, sequence.cached, end))
                    left -= end - sequence.cached
        self._write_tables()
        return Plan([s for s in self.running if s.decoding], chunks)

    def settle(self, plan: Plan) -> None:
        """After a step: the pages that it filled may be shared from now on."""
        for sequence in plan.decoding:
            self.prefixes.publish(sequence)
        for chunk in plan.chunks:
            self.prefixes.publish(chunk.sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        del self._sequences[sequence.request_id]
        if sequence.row < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def check_integrity(self) -> None:
        """EngineError where a page is lost or owned wrongly, a table is wrong, or a request could write what another
        reads."""
        self.pool.check_integrity(sequence.pages for sequence in self.running)
        rows = sorted(self._free_rows + [sequence.row for sequence in self.running])
        if rows != list(range(self.tables.shape[0])):
            raise EngineError(f"rows of the block tables lost or owned twice: {rows}")
        tables = self.tables.tolist()
        owners: dict[int, int] = {}
        for sequence in self.running:
            if tables[sequence.row][: len(sequence.pages)] != sequence.pages:
                raise EngineError(f"the block table of request {sequence.request_id!r} is not its pages")
            for page in sequence.pages:
                owners[page] = owners.get(page, 0) + 1
        for sequence in self.running:
            written = sequence.pages[sequence.cached // self.page_size :]
            shared = [page for page in written if owners[page] > 1 or self.pool.is_cached(page)]
            if shared:
                raise EngineError(f"request {sequence.request_id!r} writes KV pages that others may read: {shared}")
        waiting = {sequence.request_id for sequence in self.waiting}
        if waiting | {s.request_id for s in self.running} != self._sequences.keys():
            raise EngineError("a request is neither waiting nor running, or is both")

    def _queue(self, sequence: Sequence) -> None:
        sequence.queued_at = self._step
        insort(self.waiting, sequence, key=attrgetter("rank"))

    def _favour(self) -> None:
        """Now and then the one who came first goes ahead of its betters, so that nobody waits for ever."""
        if not self.waiting or self._step - self._favoured_at < PATIENCE:
            return
        oldest = min(self.waiting, key=attrgetter("arrival"))
        if oldest is not self.waiting[0] and self._step - oldest.queued_at >= PATIENCE:
            self._favoured_at = self._step
            self.waiting.remove(oldest)
            oldest.priority = self.waiting[0].priority
            self.waiting.insert(0, oldest)

    def _admit(self) -> None:
        """Let in who is first, again and again; nobody overtakes one who does not fit yet."""
        if not self.waiting:
            return
        # What those inside still need for the tokens that they have, and a page each to grow.
        owed = sum(self._missing(sequence) + 1 for sequence in self.running)
        while self.waiting:
            first = self.waiting[0]
            needed = self._missing(first) + owed
            if not self._free_rows or needed > self.pool.num_available:
                if not self._make_room(first, needed):
                    return
                owed = sum(self._missing(sequence) + 1 for sequence in self.running)
                continue
            self.waiting.pop(0)
            first.row = self._free_rows.pop()
            insort(self.running, first, key=attrgetter("rank"))
            self.prefixes.claim(first)
            # At once, so that what it found in the cache cannot be evicted before its turn.
            self._adopt(first)
            owed += self._missing(first) + 1

    def _make_room(self, first: Sequence, needed: int) -> bool:
        """Preempt the last of those with lower priority, if that can let `first` in."""
        lower = [sequence for sequence in self.running if sequence.priority > first.priority]
        gained = sum(len(sequence.pages) + self._missing(sequence) + 1 for sequence in lower)
        if not lower or needed > self.pool.num_available + gained:
            return False
        self._preempt(lower[-1])
        return True

    def _missing(self, sequence: Sequence) -> int:
        """Pages that the pool loses until all tokens that the sequence has are in the cache."""
        needed = self.pages_for(len(sequence.tokens), sequence.scratch)
        return needed - len(sequence.pages) - self.prefixes.shared_ahead(sequence)

    def _adopt(self, sequence: Sequence) -> None:
        for page in self.prefixes.adopt(sequence):
            self._changed.append((sequence.row, len(sequence.pages), page))
            sequence.pages.append(page)
            sequence.cached += self.page_size

    def _grow(self, sequence: Sequence, pages: int) -> bool:
        """Give it that many pages, if need be those of the ones behind it; False where it had to go itself."""
        missing = pages - len(sequence.pages)
        if missing <= 0:
            return True
        while missing > self.pool.num_available:
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        new = self.pool.allocate(missing, sequence.pages[-1] if sequence.pages else None)
        for page in new:
            self._changed.append((sequence.row, len(sequence.pages), page))
            sequence.pages.append(page)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens; its pages go, and are computed again or found in the prefix cache."""
        self.preemptions += 1
        self._leave(sequence)
        self._queue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self.prefixes.disclaim(sequence)
        self.pool.release(sequence.pages)
        sequence.row, sequence.cached, sequence.published, sequence.pages = -1, 0, 0, []

    def _write_tables(self) -> None:
        """All changes of a step at once. A row that changed hands keeps the later entry."""
        if not self._changed:
            return
        latest = {(row, column): page for row, column, page in self._changed}
        self._changed.clear()
        rows, columns = zip(*latest, strict=True)
        device = self.tables.device
        self.tables[upload(rows, device), upload(columns, device)] = upload(list(latest.values()), device)
