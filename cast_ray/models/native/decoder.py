"""All decoder layers of a target over one step as a single compiled call, for the few tokens that a round has.

It takes the fused layers of `models.fused` where their kinds are known, and works on the same pool. A token's hidden
state is the same bits whatever else the step holds, so that trees of every width and batches of every size agree
exactly with plain decoding; prompts in long parts go through PyTorch's attention, which does not promise that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cast_ray.models.attention.base import Group, Step
from cast_ray.models.kv_cache import KVCache
from cast_ray.models.native import attention as at
from cast_ray.models.native import kernels as k
from cast_ray.models.native import team as t
from cast_ray.models.native.attention import ATTEND
from cast_ray.models.native.calls import NativeLinear, Scratch, aligned, room_for, team
from cast_ray.models.native.products import COLUMNS

# More tokens than this are mostly prompts.
MOST_TOKENS = 256
# Blocks of queries that one chunk of attention has: enough to share out, and few enough to cost nothing to share.
BLOCKS = 4


class LayerParts:
    """What one layer is made of. norms: weights `[n]` float32 or None; tap: its place among the features, or None."""

    def __init__(
        self,
        qkv: NativeLinear,
        out: NativeLinear,
        gate_up: NativeLinear,
        down: NativeLinear,
        norms: tuple[Tensor, Tensor],
        head_norms: tuple[Tensor | None, Tensor | None],
    ) -> None:
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.norms, self.head_norms = norms, head_norms

    def entries(self, inner: int) -> list[int]:
        """A row of the job's table, its tap left out."""
        return [
            self.norms[0].data_ptr(),
            *self.qkv.place(),
            *(0 if norm is None else norm.data_ptr() for norm in self.head_norms),
            *self.out.place(),
            self.norms[1].data_ptr(),
            *self.gate_up.place(),
            *self.gate_up.place(inner // COLUMNS),
            *self.down.place(),
        ]


class NativeDecoder:
    """Layers and final norm of a target; embedding, rotary angles and output head stay PyTorch's.

    heads, kv_heads, dim: of attention. eps, scale: of the norms and of the scores.
    """

    def __init__(
        self,
        layers: Sequence[LayerParts],
        final_norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        scale: float,
    ) -> None:
        self._layers, self._final_norm = list(layers), final_norm
        self._size, self._inner = final_norm.shape[0], layers[0].down.inputs
        self._heads, self._dim = heads, dim
        self._fold = heads // kv_heads
        self._numbers = np.array([scale, eps], dtype=np.float32)
        self._table = np.array([[*layer.entries(self._inner), -1] for layer in layers], dtype=np.int64)
        phases = k.PHASES_A_LAYER * len(layers) + 1
        self._phases = phases
        self._counters = aligned(phases * t.PHASE_SIZE)
        self._scratch = Scratch()
        self._job = aligned(k.JOB_SIZE)
        self._job[[k.COUNTERS, k.SIZE, k.HEADS, k.KV_HEADS, k.DIM, k.INNER]] = (
            self._counters.ctypes.data, self._size, heads, kv_heads, dim, self._inner
        )  # fmt: skip
        self._job[[k.COUNT, k.TABLE, k.NUMBERS, k.FINAL_NORM, k.ATTEND_AT]] = (
            len(layers), self._table.ctypes.data, self._numbers.ctypes.data, final_norm.data_ptr(), ATTEND
        )  # fmt: skip

    def can_run(self, step: Step) -> bool:
        """Whether a step is small enough, and of a shape that the kernels know."""
        return 0 < step.tokens.shape[0] <= MOST_TOKENS

    def run(
        self,
        step: Step,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KVCache,
        page_size: int,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Final, normed hidden states `[T, size]` and features `[T, taps * size]`.

        hidden: embeddings `[T, size]` float32, written over. angles: of `fused.SignedRotary`.
        """
        rows, job, helpers = hidden.shape[0], self._job, team()
        cos, sin = (part.reshape(rows, -1).contiguous() for part in angles)
        slots = step.slots.contiguous()
        segments, units, kept = _segments(step.groups, self._fold)
        # Normed states, queries, what attention gives, and the MLP's inner states, one behind the other.
        wide = self._heads * self._dim
        work = hidden.new_empty(rows * (self._size + 2 * wide + self._inner))
        cuts = np.cumsum([0, self._size, wide, wide]) * rows * 4 + work.data_ptr()
        inner_taps = [tap for tap in taps if tap != len(self._layers) - 1]
        features = hidden.new_empty(len(inner_taps), rows, self._size) if inner_taps else None
        self._table[:, k.L_TAP] = -1
        for place, tap in enumerate(inner_taps):
            self._table[tap, k.L_TAP] = place
        longest = max(context + length for group in step.groups for context, length in _spans(group))
        widest = max(self._size, self._inner, wide)
        self._scratch.fill(job, helpers.threads, room_for(rows, widest, longest))
        job[k.ROWS] = rows
        job[k.HIDDEN : k.SIN + 1] = (
            hidden.data_ptr(), *cuts, slots.data_ptr(), cos.data_ptr(), sin.data_ptr()
        )  # fmt: skip
        job[k.SEGMENTS : k.FEATURES + 1] = (
            segments.ctypes.data,
            units.ctypes.data,
            units.shape[0],
            cache.data.data_ptr(),
            cache.data.stride(1) * 4,
            page_size,
            0 if features is None else features.data_ptr(),
        )
        helpers.run(k.LAYERS, job, self._phases)
        del kept
        normed = work[: rows * self._size].view(rows, self._size)
        if not taps:
            return normed, None
        # The public feature of the last layer is what the final norm has passed.
        last = len(self._layers) - 1
        parts = [normed if tap == last else features[inner_taps.index(tap)] for tap in taps]  # type: ignore[index]
        return normed, torch.cat(parts, dim=-1)


def _spans(group: Group) -> list[tuple[int, int]]:
    return list(zip(group.contexts, group.lengths, strict=True))


def _segments(groups: list[Group], fold: int) -> tuple[np.ndarray, np.ndarray, list[Tensor]]:
    """Descriptions `[s, 6]` and units of attention `[u, 3]` of all groups; the tensors whose addresses they hold."""
    found, kept = [], []
    for group in groups:
        lengths = np.asarray(group.lengths, dtype=np.int64)
        count = len(lengths)
        tables = group.tables.contiguous()
        about = np.zeros((count, at.SEGMENT_SIZE), dtype=np.int64)
        about[:, at.START] = group.start + np.cumsum(lengths) - lengths
        about[:, at.LENGTH], about[:, at.CONTEXT] = lengths, group.contexts
        places = np.arange(count, dtype=np.int64)
        about[:, at.TABLE] = tables.data_ptr() + places * tables.shape[1] * 8
        kept.append(tables)
        if group.mask is not None:
            mask = group.mask.contiguous()
            about[:, at.MASK] = mask.data_ptr() + places * mask.shape[1] * mask.shape[2]
            about[:, at.MASK_WIDTH] = mask.shape[2]
            kept.append(mask)
        found.append(about)
    segments = np.ascontiguousarray(np.concatenate(found))
    blocks = -(-segments[:, at.LENGTH] * fold // at.QUERIES)
    counts = -(-blocks // BLOCKS)
    owner = np.repeat(np.arange(len(segments)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * BLOCKS
    units = np.stack([owner, first, np.minimum(first + BLOCKS, blocks[owner])], axis=1)
    return segments, np.ascontiguousarray(units), kept
