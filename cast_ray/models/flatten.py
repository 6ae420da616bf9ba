"""From requests, trees and prompt chunks to one flattened forward, and from its rows back to requests.

Pure tensor work, the same for a round and for the probe. Rows of the trees come first, request by request, root first;
prompt chunks follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.models.attention.base import Group, Step
from cast_ray.models.kv_cache import slots_of
from cast_ray.transfer import upload
from cast_ray.trees.tree import CandidateTree, ancestor_mask


@dataclass(frozen=True)
class Roots:
    """The decoding requests of a round.

    tokens: `[B]` int64; positions: `[B]` int64, tokens before the root; lengths: the same as numbers;
    tables: `[B, P]` int64 pages; owners: as a group's.
    """

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    tables: Tensor
    owners: Tensor | None = None


@dataclass(frozen=True)
class Flattened:
    """Trees as rows of a forward.

    group: None where there are no requests. tokens, positions, slots: `[rows]`.
    request: `[rows]` int64, whose row it is. mask: `[B, W + 1, W + 1]` ancestors. real: `[B, W + 1]` bool, where a
    request has a node; None where all have all W. starts: `[B]` int64 row of each root.
    Made without waiting for the device: the host knows how many rows there are.
    """

    group: Group
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    request: Tensor
    mask: Tensor
    real: Tensor | None
    starts: Tensor

    def unflatten(self, values: Tensor) -> Tensor:
        """`[rows]` -> `[B, W + 1]`, 0 where there is no node."""
        if self.real is None:
            return values.view(self.mask.shape[:2])
        rows = self.starts[:, None] + torch.arange(self.real.shape[1], device=values.device)
        return values[rows.clamp_(max=values.shape[0] - 1)].masked_fill_(~self.real, 0)


def flatten_trees(roots: Roots, tree: CandidateTree, widths: list[int], page_size: int, max_position: int) -> Flattened:
    """Rows of a verification: every root and the first `widths[b]` nodes of its tree, which has W = max(widths) slots.

    Node i's key and value are written i + 1 places behind the root's, its position is the root's plus its depth.
    """
    batch, device = len(widths), roots.tokens.device
    width = tree.max_nodes
    columns = torch.arange(width + 1, device=device)
    zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    tokens = torch.cat([roots.tokens[:, None], tree.tokens], dim=1)
    # A node at max_position or beyond can never be committed; it only must not index past the model's positions.
    positions = (roots.positions[:, None] + torch.cat([zero, tree.depths], dim=1)).clamp_(max=max_position)
    slots = slots_of(roots.tables, roots.positions[:, None] + columns, page_size)
    request = torch.arange(batch, device=device)[:, None].expand(batch, width + 1)
    mask = ancestor_mask(tree, width)
    lengths = [w + 1 for w in widths]
    group = Group(0, lengths, roots.lengths, roots.tables, positions, mask, roots.owners)
    counts = upload(lengths, device)
    starts = counts.cumsum(0) - counts
    if min(widths) == width:
        tokens, positions, slots, request = (t.reshape(-1) for t in (tokens, positions, slots, request))
        return Flattened(group, tokens, positions, slots, request, mask, None, starts)
    owner = torch.repeat_interleave(torch.arange(batch, device=device), counts, output_size=sum(lengths))
    # Where each row lies among all places: those of its request begin at a multiple of W + 1.
    places = torch.arange(owner.shape[0], device=device) + owner * (width + 1) - starts[owner]
    tokens, positions, slots = (t.reshape(-1).index_select(0, places) for t in (tokens, positions, slots))
    return Flattened(group, tokens, positions, slots, owner, mask, columns < counts[:, None], starts)


@dataclass(frozen=True)
class PromptChunk:
    """Known tokens of one request that enter the cache at `start`; table: `[P]` int64. owner: its row."""

    tokens: list[int]
    start: int
    table: Tensor
    owner: int | None = None


def make_step(trees: Flattened | None, chunks: list[PromptChunk], page_size: int) -> Step:
    """One forward of trees and prompt chunks."""
    groups = [trees.group] if trees is not None else []
    tokens = [trees.tokens] if trees is not None else []
    positions = [trees.positions] if trees is not None else []
    slots = [trees.slots] if trees is not None else []
    start = trees.group.rows if trees is not None else 0
    for chunk in chunks:
        length, device = len(chunk.tokens), chunk.table.device
        index = torch.arange(chunk.start, chunk.start + length, device=device)
        tokens.append(upload(chunk.tokens, device))
        positions.append(index)
        slots.append(slots_of(chunk.table[None], index[None], page_size)[0])
        owners = None if chunk.owner is None else upload([chunk.owner], device)
        groups.append(Group(start, [length], [chunk.start], chunk.table[None], index[None], owners=owners))
        start += length
    return Step(torch.cat(tokens), torch.cat(positions), torch.cat(slots), groups)
