"""What one forward needs to know beyond its tokens, and the contract of an attention backend.

A forward is ragged: the tokens of all requests lie in one row. Requests of like shape form a *group* whose tokens are
consecutive: all the trees of a round are one group, every prompt chunk is another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cast_ray.models.kv_cache import KVCache


@dataclass(frozen=True)
class Group:
    """Segments that are attended together: `b` requests with up to `Q` new tokens each.

    start: row of the first token in the flattened batch; segments follow each other without gaps.
    lengths: new tokens of each segment (b numbers).
    contexts: tokens of each request already in the cache, all visible to its new tokens (b numbers).
    tables: `[b, P]` int64 pages of each request.
    positions: `[b, Q]` int64 position of each new token, any value where there is none.
    mask: `[b, Q, Q]` bool, which new token (row) sees which (column); None leaves it to the layer: causal or all.
    owners: `[b]` int64 rows of the requests' states, for targets with a recurrent one; None: 0 to b - 1.
    """

    start: int
    lengths: list[int]
    contexts: list[int]
    tables: Tensor
    positions: Tensor
    mask: Tensor | None = None
    owners: Tensor | None = None

    @property
    def rows(self) -> int:
        """Tokens of the group in the flattened batch."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Step:
    """One forward over a flattened batch of T tokens.

    tokens, positions, slots: `[T]` int64; slots say where each token's key and value are written.
    groups: cover rows 0..T in order.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    groups: list[Group]


@dataclass(frozen=True)
class Layer:
    """How one layer attends.

    scaling: factor on the scores. causal: for groups without a mask of their own. window: a token sees only keys less
    than this many positions away. softcap: scores pass through `softcap * tanh(scores / softcap)`.
    sinks: `[heads]` extra logits that take part in the softmax and carry no value.
    """

    index: int
    scaling: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Attention over the paged pool. Backends agree within floating-point tolerance.

    page_size: tokens of a page, that of the pool whose block tables the groups carry.
    """

    page_size: int

    def plan(self, groups: list[Group], cache: KVCache) -> Any:
        """What all layers of a forward share; made once a forward."""
        ...

    def run(self, plan: Any, queries: Tensor, layer: Layer) -> Tensor:
        """Attend: queries `[T, heads, head_dim]` -> `[T, heads, head_dim]`. Keys are in the cache already."""
        ...


class StaticAttention(Protocol):
    """Attention of one shape over buffers that never move: what a captured forward reads.

    `fill` runs before every replay and may do anything on the host. `begin` and `run` run in the captured region: no
    allocation that stays, nothing read by the host, no shape that depends on values.
    """

    def fill(self, group: Group) -> None:
        """Take in a group of just the shape that was reserved, padding segments included."""
        ...

    def begin(self) -> Any:
        """What all layers share, derived on the device; the plan that `run` gets."""
        ...

    def run(self, plan: Any, queries: Tensor, layer: Layer) -> Tensor:
        """As `AttentionBackend.run`."""
        ...


@runtime_checkable
class CapturableBackend(Protocol):
    """A backend whose attention can be captured; others run eagerly."""

    def static_shape(self, group: Group) -> tuple[int, ...] | None:
        """What a captured forward of a group depends on beyond its tokens and requests; None: this one runs eagerly."""
        ...

    def reserve(self, group: Group, cache: KVCache) -> StaticAttention:
        """Buffers for groups with as many tokens, requests, pages a request and the same `static_shape`."""
        ...


@dataclass(frozen=True)
class Attending:
    """A forward's metadata as it travels through the model's modules to each attention layer."""

    step: Step
    cache: KVCache
    backend: AttentionBackend | StaticAttention
    plan: Any

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        """Write the new keys and values `[T, kv_heads, head_dim]`, then attend."""
        self.cache.write(layer.index, self.step.slots, keys, values)
        return self.backend.run(self.plan, queries, layer)


def begin(step: Step, cache: KVCache, backend: AttentionBackend) -> Attending:
    """Plan a forward over `step`."""
    return Attending(step, cache, backend, backend.plan(step.groups, cache))


def causal_mask(length: int, device: torch.device) -> Tensor:
    """`[length, length]` bool: each token sees itself and those before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()
