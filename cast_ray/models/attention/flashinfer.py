"""Attention by FlashInfer's paged kernels on CUDA devices: over the pool itself, ragged, nothing gathered or copied.

Every call is a `BatchPrefillWithPagedKVCacheWrapper` of the fa2 kernels: fa3 knows no custom masks, and one kernel
family is compiled once and rounds the same for a root alone as for a tree. Plain decoding takes it too: it is what
FlashInfer's own decode wrapper runs on tensor cores. A plan is made once a forward for each kind of layer, when the
first of them runs, or before a captured forward is replayed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cast_ray.errors import EngineError
from cast_ray.models.attention.base import Group, Layer
from cast_ray.models.attention.packed_mask import mask_bytes, packed_mask
from cast_ray.models.attention.paging import PagedArrays, paged_arrays, starts_of
from cast_ray.models.attention.sections import Kind, Part, Section, parts_of, pays_to_split, sections_of, split_context
from cast_ray.models.attention.static_plan import Derive, Held, StaticPlan
from cast_ray.models.attention.workspace import Bounds, Workspace, pages_of
from cast_ray.models.kv_cache import KVCache

KERNELS = "fa2"
# Longest context from which on the cached pages of trees are attended without a mask: below, two more launches
# a layer cost more than making and reading the bits of a mask.
SPLIT_FROM = 2048
# Pages that a captured plan has room for at least; beyond, powers of two. Few sizes, so that few forwards are captured.
LEAST_PAGES = 256
# New tokens of a request that it has room for: masks are square in them.
QUERIES = (64, 256, 1024, 4096)


# Of a section of a plan: its place, the layers, and whether its context is split off.
_Key = tuple[int, Kind, bool]


@dataclass
class Planned:
    """A forward over some groups. serial: changes whenever the groups do. bounds, derive: of a captured forward."""

    sections: list[Section]
    splits: list[bool]
    cache: KVCache
    serial: int
    calls: dict[_Key, list[_Call]]
    bounds: Bounds | None = None
    derive: Derive | None = None
    arrays: dict[tuple[int, bytes, bytes], PagedArrays] = field(default_factory=dict)


@dataclass
class _Call:
    """One wrapper of FlashInfer. planned: the serial of the plan that it holds. copied: when its arrays are over.

    held: the buffers of a captured one.
    """

    wrapper: Any
    held: Held | None = None
    planned: int = -1
    copied: torch.cuda.Event | None = None


class FlashInferBackend:
    """See the module.

    page_size: that of the pool whose tables the groups carry. kernels: the module `flashinfer`, or what stands in for
    it. split_from: tokens of context, see SPLIT_FROM; None never splits. joined: attend prompt chunks by masks, in one
    call with the trees.
    """

    def __init__(
        self,
        page_size: int,
        device: torch.device,
        kernels: Any,
        *,
        split_from: int | None = SPLIT_FROM,
        joined: bool = False,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.split_from = split_from
        self.joined = joined
        self.kernels = kernels
        self._serials = itertools.count()
        self._workspace = Workspace(device)
        # Wrappers are kept: making one takes longer than a plan.
        self._calls: dict[int, dict[_Key, list[_Call]]] = {}

    def plan(self, groups: list[Group], cache: KVCache) -> Planned:
        sections = sections_of(groups, joined=self.joined)
        calls = self._calls.setdefault(id(cache), {})
        return Planned(sections, [self._splits(s) for s in sections], cache, next(self._serials), calls)

    def run(self, plan: Planned, queries: Tensor, layer: Layer) -> Tensor:
        """As AttentionBackend's; a layer's sinks take part after the kernels, through the sum of the weights."""
        kind = Kind.of(layer, queries.shape[1])
        if queries.stride(-1) != 1:
            queries = queries.contiguous()
        data = plan.cache.data[layer.index]  # [2, slots, kv_heads, head_dim]
        pages = tuple(half.view(-1, self.page_size, *half.shape[1:]) for half in data.unbind(0))
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for number, section in enumerate(plan.sections):
            rows = slice(section.start, section.start + section.rows)
            self._attend(self._ready(plan, number, kind, queries), queries[rows], pages, layer, out[rows])
        return out

    def static_shape(self, group: Group) -> tuple[int, int, int, int]:
        """(whether there are masks, whether the context is split off, pages and new tokens a request at most)."""
        section = sections_of([group], joined=self.joined)[0]
        pages = max(LEAST_PAGES, 1 << (pages_of(group, self.page_size) - 1).bit_length())
        queries = next(size for size in QUERIES if size >= group.positions.shape[1])
        return int(section.masked), int(self._splits(section)), pages, queries

    def reserve(self, group: Group, cache: KVCache) -> StaticPlan:
        """A plan over buffers of its own, for a captured forward; see CapturableBackend."""
        pages, queries = self.static_shape(group)[2:]
        return StaticPlan(self, group, cache, Bounds(group.rows, len(group.lengths), pages, queries))

    def replan(self, plan: Planned, dtype: torch.dtype) -> None:
        """Plan again in all wrappers that a captured forward has, its groups being new. dtype: of the queries."""
        for number, kind, _ in list(plan.calls):
            self._prepare(plan, number, kind, dtype)

    def _splits(self, section: Section) -> bool:
        return self.split_from is not None and pays_to_split(section, self.split_from)

    def _attend(self, calls: list[Any], queries: Tensor, pages: Any, layer: Layer, out: Tensor) -> None:
        """Into `out`; calls: one, or the context's and the rest's."""
        if len(calls) == 1 and layer.sinks is None:
            calls[0].run(queries, pages, out=out)
            return
        _, sums = calls[0].run(queries, pages, out=out, return_lse=True)
        for call in calls[1:]:
            others = call.run(queries, pages, return_lse=True)
            self.kernels.merge_state_in_place(out, sums, *others)
        if layer.sinks is not None:
            # FlashInfer's log-sums are of base 2. A sink is one more weight in the sum, with no value.
            share = torch.sigmoid(sums * math.log(2) - layer.sinks.float())
            out.mul_(share[..., None])

    def _ready(self, plan: Planned, number: int, kind: Kind, queries: Tensor) -> list[Any]:
        """The wrappers of a section for layers of a kind, planned."""
        calls = plan.calls.get((number, kind, plan.splits[number]))
        if calls is None or any(call.planned != plan.serial for call in calls):
            if queries.is_cuda and torch.cuda.is_current_stream_capturing():
                raise EngineError("a layer of a new kind met a captured forward: run it eagerly once before")
            calls = self._prepare(plan, number, kind, queries.dtype)
        return [call.wrapper for call in calls]

    def _prepare(self, plan: Planned, number: int, kind: Kind, dtype: torch.dtype) -> list[_Call]:
        section = plan.sections[number]
        parts = parts_of(section, kind, self.page_size, split=plan.splits[number])
        calls = plan.calls.setdefault((number, kind, plan.splits[number]), [])
        while len(calls) < len(parts):
            with torch.inference_mode(False):  # so that buffers can be written to inside inference mode and outside
                call = self._make(plan, kind, parts[len(calls)])
            if call.held is not None and plan.derive is not None:
                plan.derive(call.held)  # from the next forward on, its beginning does
            calls.append(call)
        for part, call in zip(parts, calls, strict=True):
            self._fill(plan, number, part, kind, call, dtype)
        return calls

    def _make(self, plan: Planned, kind: Kind, part: Part) -> _Call:
        kv_heads, head_dim = plan.cache.data.shape[3:]
        room = self._workspace.room(kind.heads, kv_heads, head_dim, plan.bounds)
        wrapper = self.kernels.BatchPrefillWithPagedKVCacheWrapper
        if plan.bounds is None:
            return _Call(wrapper(room, "NHD", backend=KERNELS))
        mask = starts = None
        buffers = plan.bounds.buffers(self.device)
        fixed = {"use_cuda_graph": True, **buffers}
        if part.masked:
            keys = self._most_keys(plan.bounds, kind, plan.splits[0])
            mask, starts = plan.bounds.mask_buffer(keys, self.device), plan.bounds.starts(self.device)
            fixed |= {"custom_mask_buf": mask, "mask_indptr_buf": starts}
        held = Held(part, kind, buffers["paged_kv_indices_buf"], mask, starts)
        call = _Call(wrapper(room, "NHD", backend=KERNELS, **fixed), held)
        if room.is_cuda:
            call.wrapper.reset_workspace_buffer(room, plan.bounds.index_buffer(kind.heads // kv_heads, self.device))
        return call

    def _most_keys(self, bounds: Bounds, kind: Kind, split: bool) -> int:
        """Keys that a row's mask has at most in a captured plan."""
        context = bounds.pages_each * self.page_size
        if split:
            context = 0
        elif self.split_from is not None:
            context = min(context, split_context(bounds.rows, self.split_from))
        if kind.window is not None:  # such layers are not split, and leave out the pages before their window
            context = kind.window
        return context + self.page_size + bounds.queries

    def _fill(self, plan: Planned, number: int, part: Part, kind: Kind, call: _Call, dtype: torch.dtype) -> None:
        if call.held is not None and part.masked != call.held.part.masked:
            raise EngineError("a captured forward was given segments that need another mask than those it was made for")
        groups, span = plan.sections[number].groups, part.span
        if call.held is not None:
            if call.held.mask is not None and int(mask_bytes(groups, span).sum()) > call.held.mask.shape[0]:
                raise EngineError("a captured forward was given segments whose masks are larger than its room for them")
            arrays = paged_arrays(groups, span, self.page_size, call.held.indices)
        else:
            key = (number, span.first.tobytes(), span.last.tobytes())
            arrays = plan.arrays.get(key) or paged_arrays(groups, span, self.page_size)
            plan.arrays[key] = arrays
        kv_heads, head_dim = plan.cache.data.shape[3:]
        if call.copied is not None:
            call.copied.synchronize()  # the last plan's arrays leave pinned memory that this one writes
        call.wrapper.plan(
            arrays.qo_indptr,
            arrays.kv_indptr,
            arrays.indices,
            arrays.last_page_len,
            kind.heads,
            kv_heads,
            head_dim,
            self.page_size,
            causal=part.causal,
            sm_scale=kind.scaling,
            window_left=part.window_left,
            logits_soft_cap=kind.softcap,
            q_data_type=dtype,
            kv_data_type=plan.cache.data.dtype,
            seq_lens=arrays.keys,
        )
        if part.masked and call.held is None:
            # Not through `plan`: of packed masks it counts in bits where each request's begins, and the kernels count
            # in bytes (FlashInfer PR 2201); and its copy waits for the device.
            starts = starts_of(mask_bytes(groups, span), self.device)
            call.wrapper._mask_indptr_buf = starts.to(self.device, non_blocking=True)
            call.wrapper._custom_mask_buf = packed_mask(groups, span, causal=kind.causal, window=kind.window)
        if self.device.type == "cuda":
            call.copied = call.copied or torch.cuda.Event()
            call.copied.record()
        call.planned = plan.serial
