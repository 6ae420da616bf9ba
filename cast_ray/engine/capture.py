"""Puts the captured forwards of a target and its drafter in place, where the device and the settings ask for them."""

from __future__ import annotations

import torch

from cast_ray.config import EngineConfig
from cast_ray.drafters.base import Drafter
from cast_ray.drafters.dflash import DFlashDrafter
from cast_ray.drafters.graphs import DraftGraphs
from cast_ray.models.graphs import TargetGraphs
from cast_ray.models.recordings import Limits
from cast_ray.models.target import Target
from cast_ray.width.buckets import Buckets

# Of the room for graphs; what is left is for packing and for the buffers that recordings share.
TARGET_SHARE, DRAFTER_SHARE = 0.6, 0.25


@torch.inference_mode()
def capture(config: EngineConfig, target: Target, drafter: Drafter | None, *, plain: bool, room: int) -> None:
    """Record the target's buckets ahead of need; the drafter's, and those that are left, when they are first met.

    plain: no candidates are ever verified. room: bytes set aside for them, 0 for no limit but the default.
    """
    wanted = config.graphs == "on" or (config.graphs == "auto" and target.device.type == "cuda")
    # A recurrent state is kept for the path that a round takes, by the host.
    if not wanted or target.states is not None:
        return
    widest = 1 if plain else config.max_nodes + 1
    buckets = Buckets.up_to(config.max_batch_size * widest, config.max_batch_size)

    def limits(share: float) -> Limits:
        return Limits(seconds=config.graph_seconds, **({"bytes": int(share * room)} if room else {}))

    target.graphs = TargetGraphs(target, buckets, limits(TARGET_SHARE))
    target.graphs.warm_up(widest)
    if isinstance(drafter, DFlashDrafter) and not plain:
        drafter.graphs = DraftGraphs(drafter, target, buckets, limits(DRAFTER_SHARE))
