"""FlashInfer plans of captured forwards: a group's arrays, page numbers and masks in buffers that stay where they are.

What FlashInfer schedules on the host is planned before every replay. Page numbers and masks are derived on the device,
within the captured region, from the group's lengths, tables and trees, which are all that is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cast_ray.errors import EngineError
from cast_ray.models.attention.base import Group, Layer
from cast_ray.models.attention.packed_mask import mask_bits
from cast_ray.models.attention.sections import Kind, Part
from cast_ray.models.attention.workspace import Bounds
from cast_ray.models.kv_cache import KVCache
from cast_ray.transfer import upload

if TYPE_CHECKING:
    from cast_ray.models.attention.flashinfer import FlashInferBackend, Planned


@dataclass(frozen=True)
class Held:
    """Buffers that one captured wrapper reads: page numbers; bits of masks and each request's first byte, or None."""

    part: Part  # as it was at first: its place and kind of mask, not its keys
    kind: Kind
    indices: Tensor
    mask: Tensor | None
    starts: Tensor | None


class StaticInputs:
    """A group's tensors, and what is derived from them. Segments and rows are always as many; see `Bounds`."""

    def __init__(self, group: Group, bounds: Bounds, page_size: int) -> None:
        self._page_size = page_size
        device, requests, queries = group.tables.device, bounds.requests, bounds.queries
        with torch.inference_mode(False):  # written to inside inference mode and outside
            self._sizes = torch.zeros(2, requests, dtype=torch.int32, device=device)  # lengths, contexts
            self._tables = torch.zeros(requests, bounds.pages_each, dtype=torch.int64, device=device)
            self._positions = torch.zeros(requests, queries, dtype=torch.int64, device=device)
            shape = (requests, queries, queries)
            self._mask = None if group.mask is None else torch.zeros(shape, dtype=torch.bool, device=device)

    def take(self, group: Group) -> None:
        """Copy a group in; what it leaves of the buffers is read by nobody who looks."""
        self._sizes.copy_(upload([*group.lengths, *group.contexts], self._sizes.device, torch.int32).view(2, -1))
        pages = min(self._tables.shape[1], group.tables.shape[1])
        self._tables[:, :pages].copy_(group.tables[:, :pages])
        queries = group.positions.shape[1]
        self._positions[:, :queries].copy_(group.positions)
        if self._mask is not None:
            assert group.mask is not None
            self._mask[:, :queries, :queries].copy_(group.mask)

    def derive(self, held: Held) -> None:
        """Fill a wrapper's buffers: page numbers, and masks where it has some."""
        lengths, contexts = self._sizes
        first, keys = self._span(held.part, lengths, contexts)
        pages = torch.div(keys + self._page_size - 1, self._page_size, rounding_mode="floor")
        ends = pages.cumsum(0)
        request = _owner(ends, held.indices.shape[0])
        place = torch.arange(held.indices.shape[0], device=ends.device) - (ends - pages)[request]
        place = place + torch.div(first, self._page_size, rounding_mode="floor")[request]
        held.indices.copy_(self._tables[request, place.clamp(0, self._tables.shape[1] - 1)])
        if held.mask is None or held.starts is None:
            return
        sizes = torch.div(lengths * keys + 7, 8, rounding_mode="floor")
        ends = sizes.cumsum(0)
        held.starts[1:].copy_(ends)
        facts = torch.stack([lengths, contexts, first, keys.clamp(min=1), (ends - sizes).to(torch.int32)])
        request = _owner(ends, held.mask.shape[0])
        kind = held.kind
        bits = mask_bits(request, facts, self._positions, self._mask, causal=kind.causal, window=kind.window)
        held.mask.copy_(bits)

    def _span(self, part: Part, lengths: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """First key and number of keys that a part visits, each `[b]` int32; as `paging`'s, on the device."""
        edge = torch.div(contexts, self._page_size, rounding_mode="floor") * self._page_size
        if part.place == "before":
            return torch.zeros_like(edge), edge
        if part.place == "rest":
            return edge, contexts + lengths - edge
        if part.window is None:
            return torch.zeros_like(edge), contexts + lengths
        seen = (contexts - part.window + 1).clamp(min=0)
        first = torch.div(seen, self._page_size, rounding_mode="floor") * self._page_size
        return first, contexts + lengths - first


class StaticPlan:
    """A `StaticAttention` of FlashInfer's."""

    def __init__(self, backend: FlashInferBackend, group: Group, cache: KVCache, bounds: Bounds) -> None:
        self._backend = backend
        self._bounds = bounds
        self._inputs = StaticInputs(group, bounds, backend.page_size)
        self._plan: Planned = backend.plan([group], cache)
        self._plan.calls, self._plan.bounds, self._plan.derive = {}, bounds, self._inputs.derive
        self._dtype = cache.data.dtype

    def fill(self, group: Group) -> None:
        """Take in a group, and plan for every kind of layer that was met."""
        backend, plan = self._backend, self._plan
        self._bounds.check(group, backend.page_size)
        fresh = backend.plan([group], plan.cache)
        if [s.masked for s in fresh.sections] != [s.masked for s in plan.sections] or fresh.splits != plan.splits:
            raise EngineError("a captured forward was given a group of another static shape")
        self._inputs.take(group)
        plan.sections, plan.serial = fresh.sections, fresh.serial
        plan.arrays.clear()
        backend.replan(plan, self._dtype)

    def begin(self) -> Planned:
        for held in self._held():
            self._inputs.derive(held)
        return self._plan

    def run(self, plan: Planned, queries: Tensor, layer: Layer) -> Tensor:
        return self._backend.run(plan, queries, layer)

    def wrappers(self) -> Iterator[Any]:
        """Those that hold the plan's buffers."""
        return (call.wrapper for calls in self._plan.calls.values() for call in calls)

    def _held(self) -> Iterator[Held]:
        return (call.held for calls in self._plan.calls.values() for call in calls if call.held is not None)


Derive = Callable[[Held], None]


def _owner(ends: Tensor, count: int) -> Tensor:
    """Whose each of `count` places is, `[count]` int64, given where each request's end; the last's where nobody's."""
    place = torch.arange(count, device=ends.device)
    return torch.searchsorted(ends, place, right=True).clamp(max=ends.shape[0] - 1)
