"""Step 6 of a round: the accepted paths' KV entries move to their places, their features go to the drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from cast_ray.drafters.base import Drafter
from cast_ray.models.flatten import Flattened, Roots
from cast_ray.models.target import Target
from cast_ray.trees.accept import Accepted


def commit(
    target: Target,
    drafter: Drafter | None,
    roots: Roots,
    rows: Flattened,
    accepted: Accepted,
    lengths: list[int],
    features: Tensor | None,
    page_size: int,
) -> None:
    """The whole path moves, of a request that ends on it too: its pages reach that far, and whole ones are kept for
    others with the same prefix. lengths: those of `accepted` as numbers, so that nothing is waited for.
    """
    if target.states is not None:
        target.states.keep(accepted.lengths)
    drafter = drafter if features is not None else None
    if accepted.path.shape[1] == 1:  # roots alone: they are where they belong
        if drafter is not None and features is not None:
            drafter.observe(features[rows.starts], rows.slots[rows.starts], roots.positions)
        return
    # Entries of all paths in one line, the roots first: those are where they belong.
    batch, device, total = len(lengths), roots.tokens.device, sum(lengths)
    every = torch.arange(batch, device=device)
    owner = torch.repeat_interleave(every, accepted.lengths - 1, output_size=total - batch)
    ends = (accepted.lengths - 1).cumsum(0)
    place = torch.arange(1, total - batch + 1, device=device) - (ends - accepted.lengths + 1)[owner]
    entry = accepted.path[owner, place]
    positions = roots.positions[owner] + place
    slots = _slots(roots, owner, positions, page_size)
    if total > batch:
        target.cache.move(_slots(roots, owner, roots.positions[owner] + entry, page_size), slots)
    if drafter is not None and features is not None:
        source_rows = torch.cat([rows.starts, rows.starts[owner] + entry])
        root_slots = rows.slots[rows.starts]
        places = torch.cat([roots.positions, positions])
        drafter.observe(features[source_rows], torch.cat([root_slots, slots]), places)


def _slots(roots: Roots, owner: Tensor, index: Tensor, page_size: int) -> Tensor:
    """Where tokens `index` `[n]` of the requests `owner` `[n]` lie in the pool."""
    page = torch.div(index, page_size, rounding_mode="floor")
    return roots.tables[owner, page] * page_size + index % page_size
