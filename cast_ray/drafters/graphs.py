"""A DFlash drafter's forward captured in buckets: context rows, blocks and the choice of candidates in one replay.

The batch is padded up to its bucket with blocks on the scratch page, and so are the rows that enter the context. What
waits beyond `MOST_ROWS`, after a long prompt, enters it by itself first.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.dflash import DFlashDrafter
from cast_ray.models.attention.base import CapturableBackend, Group, StaticAttention
from cast_ray.models.graphs import PADDING_CONTEXT, pad_group
from cast_ray.models.kv_cache import slots_of
from cast_ray.models.recordings import Limits, Recordings
from cast_ray.models.replay import Replay, replays
from cast_ray.models.target import Target
from cast_ray.trees.pack import DraftScores
from cast_ray.width.buckets import Buckets

MOST_ROWS = 256
Rows = tuple[Tensor, Tensor, Tensor]  # features, slots, positions of tokens that enter the context


class DraftGraphs:
    """See the module. `DFlashDrafter.propose` asks `run` first; None sends it back to the eager path."""

    def __init__(self, drafter: DFlashDrafter, target: Target, buckets: Buckets, limits: Limits | None = None) -> None:
        self._drafter = drafter
        self._target = target
        self._batches = buckets.batches
        self._page_size = target.backend.page_size
        self._page = drafter.cache.slots // self._page_size
        self._recordings: Recordings[_Proposal] = Recordings("draft graphs", target.device, limits or Limits())
        self._replays = replays(target.device)
        if not isinstance(target.backend, CapturableBackend):
            self._recordings.off = f"{type(target.backend).__name__} cannot be captured"

    def run(self, contexts: DraftContexts, rows: Rows, top_k: int) -> DraftScores | None:
        """`DFlashDrafter.propose` over a captured bucket, None where there is none. Valid until the next proposal."""
        batch = len(contexts.lengths)
        seat = bisect_left(self._batches, batch)
        if seat == len(self._batches) or not self._recordings.usable:
            return None
        padded = self._batches[seat]
        blocks = self._drafter.blocks(contexts.positions, contexts.lengths, contexts.tables)
        group = pad_group(blocks, padded * self._drafter.block_size, padded, page=self._page)
        backend = self._target.backend
        assert isinstance(backend, CapturableBackend)
        shape = backend.static_shape(group)
        if shape is None:
            return None
        count = rows[0].shape[0]
        room = 1 << (count - 1).bit_length() if 0 < count <= MOST_ROWS else 1

        def make() -> _Proposal:
            return self._record(contexts, rows, group, room, top_k)

        proposal = self._recordings.find((padded, room, top_k, shape), make)
        if proposal is None:
            return None
        proposal.fill(contexts, self._within(rows), group)
        return proposal.replay(batch)

    def report(self) -> dict[str, Any]:
        """Plain values: see `Recordings.report`."""
        return self._recordings.report()

    def _within(self, rows: Rows) -> Rows:
        """Rows that one proposal takes in: all, or none where they are too many and have entered the context here."""
        if rows[0].shape[0] <= MOST_ROWS:
            return rows
        self._drafter.write_rows(*rows)
        features, slots, positions = rows
        return features[:0], slots[:0], positions[:0]

    def _record(self, contexts: DraftContexts, rows: Rows, group: Group, room: int, top_k: int) -> _Proposal:
        proposal = _Proposal(self._drafter, self._target, group, room, top_k, self._page * self._page_size)
        proposal.fill(contexts, tuple(part[:room] for part in rows), group)  # type: ignore[arg-type]
        proposal.capture(self._replays())
        return proposal


class _Proposal:
    """One recording: its buffers, its attention and its outputs.

    room: context rows that it takes; place: the first slot of the scratch page.
    """

    def __init__(self, drafter: DFlashDrafter, target: Target, group: Group, room: int, top_k: int, place: int) -> None:
        assert isinstance(target.backend, CapturableBackend)
        self._drafter = drafter
        self._page_size = target.backend.page_size
        self._top_k = top_k
        self._attention: StaticAttention = target.backend.reserve(group, drafter.cache)
        batch, device = len(group.lengths), target.device
        width = len(drafter.taps) * target.hidden_size
        with torch.inference_mode(False):
            self._features = torch.zeros(room, width, dtype=target.dtype, device=device)
            self._slots = torch.zeros(room + group.rows, dtype=torch.int64, device=device)
            self._positions = torch.zeros_like(self._slots)
            self._roots = torch.zeros(batch, dtype=torch.int64, device=device)
            self._temperatures = torch.ones(batch, device=device)
        self._padding_slots = torch.full((room,), place, device=device)
        self._padding_positions = torch.zeros_like(self._padding_slots)
        self._padding_roots = torch.full((batch,), PADDING_CONTEXT, device=device)

    def fill(self, contexts: DraftContexts, rows: Rows, group: Group) -> None:
        """Take in a round's requests; group: their blocks, padded to the bucket."""
        features, slots, positions = rows
        count, batch = features.shape[0], contexts.roots.shape[0]
        self._features[:count].copy_(features)
        starts = torch.cat([contexts.positions, self._padding_roots[batch:]])
        blocks = starts[:, None] + torch.arange(self._drafter.block_size, device=starts.device)
        block_slots = slots_of(group.tables, blocks, self._page_size)
        torch.cat([slots, self._padding_slots[count:], block_slots.reshape(-1)], out=self._slots)
        torch.cat([positions, self._padding_positions[count:], blocks.reshape(-1)], out=self._positions)
        self._roots[:batch].copy_(contexts.roots)
        if contexts.temperatures is None:
            self._temperatures.fill_(1.0)
        else:
            self._temperatures[:batch].copy_(contexts.temperatures)
        self._attention.fill(group)

    def capture(self, replay: Replay) -> None:
        self._replay = replay
        self._outputs = replay.capture(self._compute)

    def replay(self, batch: int) -> DraftScores:
        """Scores of the first `batch` requests."""
        self._replay.replay()
        return DraftScores(*(output[:batch] for output in self._outputs))

    @torch.inference_mode()
    def _compute(self) -> tuple[Tensor, ...]:
        plan = self._attention.begin()
        inputs = (self._roots, self._features, self._slots, self._positions)
        hidden = self._drafter.hidden(*inputs, self._attention, plan)
        scores = self._drafter.scores(hidden, self._roots, self._temperatures, self._top_k)
        found = (scores.logprobs, scores.token_ids)
        return found if scores.pairwise is None else (*found, scores.pairwise)
