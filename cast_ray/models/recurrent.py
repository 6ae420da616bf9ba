"""The recurrent state of hybrid targets, one for each running request, and the layers that read and write it.

The gated delta layers of a Hugging Face model are wrapped in place: projections, norms and gates stay its own, while
state, convolution and delta rule run here over the ragged batch. Prompt chunks move a request's state at once. A
verified chain leaves it alone, as its own snapshot, until `keep` says how much of the chain was accepted. A state
cannot branch: nodes of a tree that is no chain come out wrong, so nobody may verify one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from cast_ray.models.attention.base import Group, Step
from cast_ray.models.delta import Solved, advance, run_chunks, solve
from cast_ray.models.families import RECURRENT, layer_kinds

# Inside the root of a norm: that of the published layers.
EPSILON = 1e-6


@dataclass
class _Segments:
    """The segments of a group, padded to the longest. rows: `[b, L]` int64 rows of the flattened batch.

    real: `[b, L]` bool. owners: `[b]` int64 rows of the states. waits: whether `keep` decides what becomes of them.
    """

    rows: Tensor
    real: Tensor
    owners: Tensor
    lengths: Tensor
    waits: bool


@dataclass
class RecurrentStates:
    """State of every running request in every recurrent layer, by the request's row of the block tables.

    convolved: `[layers, rows, kernel - 1, channels]`, the last inputs of the convolution, oldest first.
    memory: `[layers, rows, heads, k_dim, v_dim]` float32.
    """

    convolved: Tensor
    memory: Tensor
    _segments: list[_Segments] = field(default_factory=list)
    _waiting: dict[int, tuple[Tensor, Solved]] = field(default_factory=dict)  # by layer: window and solved tokens

    @property
    def nbytes(self) -> int:
        """Memory that the states take."""
        return self.convolved.nbytes + self.memory.nbytes

    def begin(self, step: Step) -> None:
        """Before a forward over `step`: requests without context start from nothing."""
        device = self.memory.device
        self._waiting.clear()
        self._segments = [_segments(group, device) for group in step.groups]
        for group, segments in zip(step.groups, self._segments, strict=True):
            if fresh := [b for b, context in enumerate(group.contexts) if context == 0]:
                rows = segments.owners[torch.tensor(fresh, device=device)]
                self.convolved.index_fill_(1, rows, 0.0)
                self.memory.index_fill_(1, rows, 0.0)

    def keep(self, lengths: Tensor) -> None:
        """After a verification: each state moves past its root and accepted nodes, `lengths` `[b]` int64 in all."""
        if not self._waiting:
            return
        owners = next(segments.owners for segments in self._segments if segments.waits)
        for layer, (window, solved) in self._waiting.items():
            self.convolved[layer, owners] = self._last(window, lengths)
            self.memory[layer, owners] = advance(self.memory[layer, owners], solved, lengths)
        self._waiting.clear()

    def run(self, layer: int, mixed: Tensor, parts: Parts) -> Tensor:
        """One layer over the whole step: mixed `[T, channels]` before the convolution -> `[T, heads, v_dim]`."""
        out = mixed.new_empty(mixed.shape[0], parts.heads, parts.v_dim)
        for segments in self._segments:
            found = self._run_segments(layer, mixed, parts, segments)
            out[segments.rows[segments.real]] = found.transpose(1, 2)[segments.real].to(out.dtype)
        return out

    def _run_segments(self, layer: int, mixed: Tensor, parts: Parts, segments: _Segments) -> Tensor:
        """`[b, heads, L, v_dim]` float32."""
        rows, owners = segments.rows, segments.owners
        window = torch.cat([self.convolved[layer, owners], mixed[rows]], dim=1)
        kernel = parts.convolution
        convolved = F.conv1d(window.mT, kernel, parts.bias, groups=kernel.shape[0]).mT
        queries, keys, values = parts.split(parts.activation(convolved))
        real = segments.real[:, None]
        # Padding neither decays the state nor adds to it.
        gates = parts.gates[rows].transpose(1, 2).masked_fill(~real, 0.0)
        strengths = parts.strengths[rows].transpose(1, 2).masked_fill(~real, 0.0)
        state = self.memory[layer, owners]
        if segments.waits:
            out, solved = solve(queries, keys, values, gates, strengths, state)
            self._waiting[layer] = window, solved
            return out
        out, moved = run_chunks(queries, keys, values, gates, strengths, state)
        self.memory[layer, owners] = moved
        self.convolved[layer, owners] = self._last(window, segments.lengths)
        return out

    def _last(self, window: Tensor, lengths: Tensor) -> Tensor:
        """The convolution's last inputs `[b, kernel - 1, channels]` behind the first `lengths` tokens of a window."""
        index = lengths[:, None] + torch.arange(self.convolved.shape[2], device=window.device)
        return window.gather(1, index[..., None].expand(-1, -1, window.shape[2]))


@dataclass(frozen=True)
class Parts:
    """What one layer makes of the step's tokens, and how it goes on with them.

    gates, strengths: `[T, heads]` float32. convolution: `[channels, 1, kernel]`. split: convolved channels
    `[b, L, channels]` into queries, keys and values `[b, heads, L, dim]` for `solve`.
    """

    gates: Tensor
    strengths: Tensor
    convolution: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    heads: int
    v_dim: int


class StatefulDelta(nn.Module):
    """A gated delta layer of Qwen3-Next or Qwen3.5 over the step that its states were begun for."""

    def __init__(self, block: Any, index: int, states: RecurrentStates) -> None:
        super().__init__()
        self.block = block
        self.index = index
        self._states = states

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """hidden_states `[1, T, hidden]` -> the same shape."""
        block, hidden = self.block, hidden_states[0]
        mixed, z, b, a = _project(block, hidden_states)
        parts = Parts(
            gates=-block.A_log.float().exp() * F.softplus(a.float() + block.dt_bias),
            strengths=b.float().sigmoid(),
            convolution=block.conv1d.weight,
            bias=block.conv1d.bias,
            activation=F.silu,
            split=self._split,
            heads=block.num_v_heads,
            v_dim=block.head_v_dim,
        )
        out = self._states.run(self.index, mixed, parts)
        gated = block.norm(out.reshape(-1, block.head_v_dim), z.reshape(-1, block.head_v_dim))
        return block.out_proj(gated.view(1, hidden.shape[0], -1))

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = self.block
        shared = block.num_v_heads // block.num_k_heads
        widths = [block.key_dim, block.key_dim, block.value_dim]
        queries, keys, values = (
            part.unflatten(-1, (-1, dim)).float()
            for part, dim in zip(
                convolved.split(widths, dim=-1), (block.head_k_dim, block.head_k_dim, block.head_v_dim), strict=True
            )
        )
        queries, keys = (_normal(part).repeat_interleave(shared, dim=2).transpose(1, 2) for part in (queries, keys))
        return queries * block.head_k_dim**-0.5, keys, values.transpose(1, 2)


def keep_states(model: PreTrainedModel, rows: int) -> RecurrentStates | None:
    """Give a hybrid target states for `rows` requests, in place; None for a target whose layers all attend.

    Its attention layers are numbered anew, because they alone have a place in the KV pool.
    """
    kinds = layer_kinds(model.config.get_text_config())
    if RECURRENT not in kinds:
        return None
    layers = model.get_decoder().layers
    recurrent = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == RECURRENT]
    states = empty_states([layer.linear_attn for layer in recurrent], rows, model.device)
    for index, layer in enumerate(recurrent):
        layer.linear_attn = StatefulDelta(layer.linear_attn, index, states)
    for index, layer in enumerate(layer for layer, kind in zip(layers, kinds, strict=True) if kind != RECURRENT):
        layer.self_attn.layer_idx = index
    return states


def empty_states(blocks: list[Any], rows: int, device: torch.device) -> RecurrentStates:
    """States of `rows` requests for these layers, which are all of one shape."""
    first = blocks[0]
    weight = first.conv1d.weight  # [channels, 1, kernel]
    memory = (len(blocks), rows, first.num_v_heads, first.head_k_dim, first.head_v_dim)
    return RecurrentStates(
        torch.zeros(len(blocks), rows, weight.shape[2] - 1, weight.shape[0], dtype=weight.dtype, device=device),
        torch.zeros(memory, dtype=torch.float32, device=device),
    )


def state_bytes(text: Any, dtype: torch.dtype) -> int:
    """Bytes of one request's state in all layers of a text config; 0 where all layers attend."""
    count = layer_kinds(text).count(RECURRENT)
    if not count:
        return 0
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    window = (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * dtype.itemsize
    return int(count * (window + values * text.linear_key_head_dim * torch.float32.itemsize))


def _project(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `[1, T, hidden]`: channels of the convolution `[T, channels]`, z `[T, heads, v_dim]`, b and a `[T, heads]`."""
    if hasattr(block, "in_proj_qkv"):  # Qwen3.5
        mixed = block.in_proj_qkv(hidden)
        z = block.in_proj_z(hidden).unflatten(-1, (-1, block.head_v_dim))
        return mixed[0], z[0], block.in_proj_b(hidden)[0], block.in_proj_a(hidden)[0]
    joined, gates = block.in_proj_qkvz(hidden), block.in_proj_ba(hidden)
    queries, keys, values, z, b, a = block.fix_query_key_value_ordering(joined, gates)
    mixed = torch.cat([part.flatten(2) for part in (queries, keys, values)], dim=-1)
    return mixed[0], z[0], b[0], a[0]


def _normal(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + EPSILON)


def _segments(group: Group, device: torch.device) -> _Segments:
    lengths = torch.tensor(group.lengths, device=device)
    longest = max(group.lengths)
    places = torch.arange(longest, device=device)
    first = lengths.cumsum(0) - lengths + group.start
    real = places < lengths[:, None]
    rows = first[:, None] + torch.minimum(places, lengths[:, None] - 1)
    owners = group.owners if group.owners is not None else torch.arange(len(group.lengths), device=device)
    return _Segments(rows, real, owners, lengths, waits=group.mask is not None and longest > 1)
