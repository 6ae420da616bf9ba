"""How a group of ragged segments is cut into parts that are attended by one dense call each.

A part holds requests of like shape, so that little of it is padding, and few enough that their gathered keys stay in
the processor's cache between the copy and the product. Index arithmetic alone: nothing here reads a key or a query.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cast_ray.models.attention.base import Group, causal_mask
from cast_ray.models.kv_cache import slots_of
from cast_ray.transfer import upload

# Matrix products of two or three rows have no kernel of their own in MKL: four are faster.
LEAST_ROWS = 4


@dataclass
class Part:
    """Some requests of a group: `b` of them, each padded to Q new tokens and K keys.

    first_row: `[b]` int64 row of each request's first new token in the flattened batch.
    run_start: first slot where the keys of the one request are consecutive; key_slots `[b * K]` int64 where not.
    masks: additive masks by kind of layer, made when a layer first asks.
    """

    group: Group
    queries: int
    keys: int
    first_row: Tensor
    run_start: int | None
    key_slots: Tensor | None
    masks: dict[tuple[bool, int | None, int], Tensor | None] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.group.lengths)

    def rows(self, fold: int) -> int:
        """Query rows of each key head: every query head that shares the key head is one more row."""
        rows = fold * self.queries
        return LEAST_ROWS if 1 < rows < LEAST_ROWS else rows

    def query_index(self, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Where the part's query rows lie in queries viewed as `[T * heads, dim]`, and which of them are no padding.

        Both `[b * kv_heads * rows]`, int64 and bool; rows count heads first, then tokens.
        """
        device, fold, q = self.first_row.device, heads // kv_heads, self.queries
        token = torch.arange(q, device=device).repeat(fold)
        head = torch.arange(fold, device=device).repeat_interleave(q)
        real = torch.ones_like(token, dtype=torch.bool)
        if extra := self.rows(fold) - fold * q:
            token, head = (torch.cat([t, t.new_zeros(extra)]) for t in (token, head))
            real = torch.cat([real, real.new_zeros(extra)])
        lengths = upload(self.group.lengths, device)[:, None]
        row = self.first_row[:, None] + torch.minimum(token, lengths - 1)
        kv = torch.arange(kv_heads, device=device)[:, None] * fold
        index = row[:, None] * heads + (kv + head)
        real = (real & (token < lengths))[:, None].expand(-1, kv_heads, -1)
        return index.reshape(-1), real.reshape(-1)

    def mask(self, causal: bool, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[b, 1, rows or 1, K]`; None where every query sees every key."""
        kind = (causal, window, fold)
        if kind not in self.masks:
            self.masks[kind] = self._make_mask(causal, window, fold, dtype)
        return self.masks[kind]

    def _make_mask(self, causal: bool, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        if self.queries == 1 and window is None and min(self.group.contexts) + 1 == self.keys:
            return None
        visible = visible_keys(self.group, self.queries, self.keys, causal, window)
        additive = torch.zeros((), dtype=dtype, device=visible.device).where(visible, float("-inf"))
        if self.queries > 1:
            additive = additive.repeat(1, fold, 1)
            if extra := self.rows(fold) - additive.shape[1]:
                additive = torch.cat([additive, additive[:, :1].expand(-1, extra, -1)], dim=1)
        return additive[:, None]


def cut(group: Group, page_size: int, most_keys: int | None, *, looks: bool = True) -> list[Part]:
    """The parts of a group, requests of like width and context together; most_keys: padded keys of one part.

    None leaves the group whole, in its own order. looks: whether page numbers may be looked at, which waits for a
    device: keys of one request whose pages follow each other are then not gathered.
    """
    device = group.tables.device
    lengths = upload(group.lengths, device)
    first_row = lengths.cumsum(0) - lengths + group.start
    keys = [c + n for c, n in zip(group.contexts, group.lengths, strict=True)]
    if len(keys) == 1 or most_keys is None:
        return [_part(group, first_row, page_size, looks)]
    # Widths that round to the same power of two may share a part: a lone wide tree would else pad all the others.
    order = sorted(range(len(keys)), key=lambda i: (-group.lengths[i].bit_length(), -keys[i]))
    parts: list[list[int]] = []
    for i in order:
        mates = parts[-1] if parts else []
        alike = mates and group.lengths[mates[0]].bit_length() == group.lengths[i].bit_length()
        # The longest of a part comes first, so its keys are what every other is padded to.
        if alike and (len(mates) + 1) * keys[mates[0]] <= most_keys:
            mates.append(i)
        else:
            parts.append([i])
    if len(parts) == 1:
        return [_part(group, first_row, page_size, looks)]
    cuts = []
    for mates in parts:
        index = upload(mates, device)
        widest = max(group.lengths[i] for i in mates)
        some = Group(
            start=group.start,
            lengths=[group.lengths[i] for i in mates],
            contexts=[group.contexts[i] for i in mates],
            tables=group.tables[index],
            positions=group.positions[index, :widest],
            mask=None if group.mask is None else group.mask[index, :widest, :widest],
        )
        cuts.append(_part(some, first_row[index], page_size, looks))
    return cuts


def _part(group: Group, first_row: Tensor, page_size: int, looks: bool) -> Part:
    device = group.tables.device
    keys = max(c + n for c, n in zip(group.contexts, group.lengths, strict=True))
    queries = max(group.lengths)
    if looks and len(group.lengths) == 1:
        table = group.tables[0, : -(-keys // page_size)]
        if bool((table[1:] == table[:-1] + 1).all()):
            return Part(group, queries, keys, first_row, int(table[0]) * page_size, None)
    # Padding repeats a request's own last key: masked, but it must not be another's, nor memory never written.
    last = upload(group.contexts, device) + upload(group.lengths, device) - 1
    index = torch.minimum(torch.arange(keys, device=device)[None], last[:, None])
    return Part(group, queries, keys, first_row, None, slots_of(group.tables, index, page_size).reshape(-1))


def visible_keys(group: Group, queries: int, keys: int, causal: bool, window: int | None) -> Tensor:
    """`[b, queries, keys]` bool: which key each new token of the group sees. Rows of padding see something."""
    device = group.tables.device
    contexts, lengths = upload(group.contexts, device), upload(group.lengths, device)
    return visible(contexts, lengths, group.positions, group.mask, queries, keys, causal, window)


def visible(
    contexts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """As `visible_keys`, from tensors alone. contexts, lengths: `[b]` int64; positions, mask: as a group has them."""
    device, b = contexts.device, contexts.shape[0]
    contexts, lengths = contexts[:, None], lengths[:, None]
    index = torch.arange(keys, device=device)[None]
    own = index - contexts  # [b, keys]: index among the segment's new tokens, negative in the cached context
    inside = (own >= 0) & (own < lengths)
    own = own.clamp(0, queries - 1)
    two_sided = mask is None and not causal
    if mask is None:
        square = (
            causal_mask(queries, device) if causal else torch.ones(queries, queries, dtype=torch.bool, device=device)
        )
        mask = square.expand(b, queries, queries)
    new = mask.gather(2, own[:, None].expand(b, queries, keys)) & inside[:, None]
    seen = new | (index < contexts)[:, None]
    if window is not None:
        key_positions = torch.where(index < contexts, index, positions.gather(1, own))
        distance = positions[:, :, None] - key_positions[:, None]
        near = distance < window
        if two_sided:
            near &= distance > -window
        seen &= near
    return seen
