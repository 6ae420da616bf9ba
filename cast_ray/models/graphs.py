"""The target's verifying forward captured in buckets: static buffers in, one replay, and the rows asked for out.

A forward of trees alone is padded up to its bucket (`width.buckets`) with segments that write to a scratch page and
read the first place of it, so that every row stays a number. Forwards with prompt chunks, and those that are too large,
run eagerly.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cast_ray.models.attention.base import Attending, CapturableBackend, Group, Step
from cast_ray.models.recordings import Limits, Recordings
from cast_ray.models.replay import Replay, replays
from cast_ray.models.target import Target, TargetOutput
from cast_ray.width.buckets import TOKENS, Buckets

# Cached tokens of a padding segment: one, so that its rows have something to look at.
PADDING_CONTEXT = 1


class TargetGraphs:
    """See the module. `Target.forward` asks `run` first; None sends it back to the eager path."""

    def __init__(self, target: Target, buckets: Buckets, limits: Limits | None = None) -> None:
        self.buckets = buckets
        self._target = target
        self._page = target.cache.slots // target.backend.page_size  # the scratch page, right behind the pool
        self._recordings: Recordings[_Forward] = Recordings("verify graphs", target.device, limits or Limits())
        self._replays = replays(target.device)
        if not isinstance(target.backend, CapturableBackend):
            self._recordings.off = f"{type(target.backend).__name__} cannot be captured"
        with torch.inference_mode(False):
            self._logits = torch.empty(buckets.tokens[-1], target.vocab_size, dtype=target.dtype, device=target.device)

    def run(self, step: Step, logit_rows: Tensor) -> TargetOutput | None:
        """`Target.forward` over a captured bucket, or None where there is none for this step."""
        group = step.groups[0] if len(step.groups) == 1 else None
        rows = step.tokens.shape[0]
        if group is None or group.mask is None or logit_rows.shape[0] != rows:
            return None
        found = self._find(step, group)
        if found is None:
            return None
        forward, padded = found
        forward.fill(step, padded)
        return forward.replay(rows)

    def warm_up(self, widest: int) -> None:
        """Record buckets ahead of need, small ones first: those that up to `widest` rows a request can fall in."""
        sizes = [
            (tokens, batch)
            for tokens in self.buckets.tokens
            for batch in self.buckets.batches
            if batch <= tokens <= batch * widest
        ]
        wanted = []
        for tokens, batch in sizes:
            step = self._padding_step(tokens, batch)
            key = self._key(step.groups[0])
            if key is not None:
                wanted.append((key, lambda step=step: self._record(step, step.groups[0])))
        self._recordings.ahead(wanted)

    def report(self) -> dict[str, Any]:
        """Plain values: see `Recordings.report`."""
        return {"buckets": self.buckets.to_list(), **self._recordings.report()}

    def _find(self, step: Step, group: Group) -> tuple[_Forward, Group] | None:
        bucket = self.buckets.find(group.rows, len(group.lengths))
        if bucket is None or not self._recordings.usable:
            return None
        padded = pad_group(group, *bucket, page=self._page)
        key = self._key(padded)
        if key is None:
            return None
        forward = self._recordings.find(key, lambda: self._record(step, padded))
        return None if forward is None else (forward, padded)

    def _key(self, group: Group) -> Hashable | None:
        """What a recording is good for: a padded group's tokens, requests and what else its attention depends on."""
        assert isinstance(self._target.backend, CapturableBackend)
        shape = self._target.backend.static_shape(group)
        return None if shape is None else (group.rows, len(group.lengths), shape)

    def _record(self, step: Step, group: Group) -> _Forward:
        forward = _Forward(self._target, group, self._logits[: group.rows], self._page)
        forward.fill(step, group)
        forward.capture(self._replays())
        return forward

    def _padding_step(self, tokens: int, batch: int) -> Step:
        """A step of padding alone, for recording: no request's pages are touched."""
        device = self._target.device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        empty = Group(0, [], [], nothing.view(0, 1), nothing.view(0, 1), nothing.bool().view(0, 1, 1))
        return Step(nothing, nothing, nothing, [pad_group(empty, tokens, batch, page=self._page)])


class _Forward:
    """One recording: its buffers, its attention and its outputs."""

    def __init__(self, target: Target, group: Group, logits: Tensor, page: int) -> None:
        assert isinstance(target.backend, CapturableBackend)
        self._target = target
        self._attention = target.backend.reserve(group, target.cache)
        self._logits = logits
        with torch.inference_mode(False):
            zeros = torch.zeros(3, group.rows, dtype=torch.int64, device=target.device)
        self._inputs = zeros.unbind(0)  # tokens, positions, slots
        # Every row of padding is token 0 at position 0 and writes to the first place of the scratch page.
        self._padding = (zeros.new_zeros(group.rows), zeros.new_zeros(group.rows))
        self._padding_slots = torch.full_like(self._padding[0], page * target.backend.page_size)

    def fill(self, step: Step, group: Group) -> None:
        """Take in a step; group: its group, padded to the bucket. The first thing outside the captured region."""
        rows = step.tokens.shape[0]
        given = (step.tokens, step.positions, step.slots)
        for buffer, values, filler in zip(self._inputs, given, (*self._padding, self._padding_slots), strict=True):
            torch.cat([values, filler[rows:]], out=buffer)
        self._attention.fill(group)

    def capture(self, replay: Replay) -> None:
        self._replay = replay
        self._outputs = replay.capture(self._compute)

    def replay(self, rows: int) -> TargetOutput:
        """The first `rows` rows; valid until the next forward."""
        self._replay.replay()
        logits, *features = self._outputs
        return TargetOutput(logits[:rows], features[0][:rows] if features else None)

    @torch.inference_mode()
    def _compute(self) -> tuple[Tensor, ...]:
        tokens, positions, slots = self._inputs
        step = Step(tokens, positions, slots, groups=[])
        attending = Attending(step, self._target.cache, self._attention, self._attention.begin())
        output = self._target.compute(attending, 0)
        # One buffer for all buckets: a vocabulary's logits for each of them would take gigabytes.
        self._logits.copy_(output.logits)
        return (self._logits,) if output.features is None else (self._logits, output.features)


def pad_group(group: Group, tokens: int, batch: int, *, page: int) -> Group:
    """A group of trees or blocks with segments of padding behind it: `tokens` rows and `batch` requests in all.

    There is a segment of padding where there are rows of it; segments may be empty. Each has one cached token, and all
    its places lie on `page`. New tokens a request are padded to a size of a few, so that shapes repeat.
    """
    more, rows = batch - len(group.lengths), tokens - group.rows
    share, left = divmod(rows, more) if more else (0, 0)
    lengths = [*group.lengths, *(share + (i < left) for i in range(more))]
    queries = next((size for size in TOKENS if size >= max(lengths)), max(lengths))
    wider = queries - group.positions.shape[1]
    # As many columns as a segment of padding has places at most: a page holds one or more.
    columns = max(0, PADDING_CONTEXT + share + 1 - group.tables.shape[1])
    tables, mask = pad(group.tables, (0, columns, 0, more), value=page), group.mask
    positions = pad(group.positions, (0, wider, 0, more), value=PADDING_CONTEXT)
    if mask is not None:
        mask = pad(mask, (0, wider, 0, wider, 0, more))
    return Group(0, lengths, [*group.contexts, *[PADDING_CONTEXT] * more], tables, positions, mask)
