"""Masks of ragged requests as bits, as FlashInfer's kernels read them; built on the device, all requests at once.

A request's mask is its `[new tokens, keys]` matrix, row by row, one bit an element, the lowest bit of a byte first;
every request begins on a byte. A window counts positions, not rows: siblings of a tree share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cast_ray.models.attention.base import Group
from cast_ray.models.attention.paging import Counts, Span, lengths_of
from cast_ray.transfer import upload


def mask_bytes(groups: Sequence[Group], span: Span) -> Counts:
    """Bytes of each request's mask, `[b]`."""
    return -(-lengths_of(groups) * span.keys // 8)


def packed_mask(groups: Sequence[Group], span: Span, *, causal: bool, window: int | None) -> Tensor:
    """Which key of `span` each new token sees, `[bytes]` uint8 on the device.

    causal: for groups without a mask of their own, the only ones whose window reaches ahead as well where it is not.
    """
    parts, at = [], 0
    for group in groups:
        some = slice(at, at + len(group.lengths))
        parts.append(_group_mask(group, Span(span.first[some], span.last[some]), causal, window))
        at += len(group.lengths)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _group_mask(group: Group, span: Span, causal: bool, window: int | None) -> Tensor:
    device, requests = group.tables.device, len(group.lengths)
    sizes = mask_bytes([group], span)
    total = int(sizes.sum())
    host = np.asarray([group.lengths, group.contexts, span.first, span.keys, sizes.cumsum() - sizes, sizes])
    facts = upload(host.reshape(-1), device, torch.int32).view(6, requests)
    request = torch.arange(requests, device=device).repeat_interleave(facts[5], output_size=total)
    return mask_bits(request, facts[:5], group.positions, group.mask, causal=causal, window=window)


def mask_bits(
    request: Tensor, facts: Tensor, positions: Tensor, mask: Tensor | None, *, causal: bool, window: int | None
) -> Tensor:
    """The bytes of packed masks from tensors alone, `[bytes]` uint8; nothing waits, no shape depends on values.

    request: `[bytes]` int64, whose each byte is. facts: `[5, b]` int32, of each request its new tokens, cached tokens,
    first key of the span, keys of the span, and first byte. positions, mask: as a group has them. Bytes behind a
    request's mask are 0.
    """
    device = request.device
    length, context, first, keys, start = facts[:, request, None]  # each [bytes, 1]
    byte = torch.arange(request.shape[0], device=device, dtype=torch.int32)[:, None]
    bit = (byte - start) * 8 + torch.arange(8, device=device, dtype=torch.int32)  # [bytes, 8]
    row = torch.div(bit, keys, rounding_mode="floor")
    key = bit - row * keys + first
    own = key - context  # index among the new tokens, negative in the cached context
    widest = positions.shape[1] - 1
    real, row, place = row < length, row.clamp(max=widest), own.clamp(0, widest)
    seen = own < 0
    if mask is not None:
        seen |= mask[request[:, None], row, place]
    elif causal:
        seen |= own <= row
    else:
        seen = torch.ones_like(seen)
    if window is not None:
        positions = positions.to(torch.int32)
        there = torch.where(own < 0, key, positions[request[:, None], place])
        distance = positions[request[:, None], row] - there
        seen &= distance < window
        if mask is None and not causal:
            seen &= distance > -window
    weights = torch.pow(2, torch.arange(8, device=device)).to(torch.uint8)
    return ((seen & real) * weights).sum(dim=1, dtype=torch.uint8)
