"""What a round with candidates teaches the width policy and the watch over the drafter: found on the device, told when
it has been read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cast_ray.engine.health import DrafterHealth
from cast_ray.engine.tally import drafter_record
from cast_ray.trees.accept import Accepted
from cast_ray.trees.edit import set_aside
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.policy import WidthPolicy


@dataclass(frozen=True)
class Lesson:
    """offered: the tree as the policy saw it. on_device: what of the outcome is to be read, see `teach`."""

    offered: CandidateTree
    on_device: dict[str, Tensor]


def make_lesson(
    foreign: Tensor | None,
    offered: CandidateTree,
    chosen: Tensor,
    accepted: Accepted,
    temperatures: Tensor | None,
    *,
    health: DrafterHealth | None,
) -> Lesson:
    """foreign: `[B]` bool, requests to learn nothing from. chosen: `[B]` nodes verified. health: the watch over the
    drafter, where that ran."""
    widths = chosen
    if foreign is not None:
        offered, widths, accepted = set_aside(foreign, offered, chosen, accepted)
    parts = {"widths": widths, "path": accepted.path, "path_lengths": accepted.lengths}
    if health is not None:
        parts["record"] = drafter_record(offered, widths, accepted, temperatures, health.recorded_on(widths.device))
    return Lesson(offered, parts)


def teach(
    lesson: Lesson,
    read: dict[str, Tensor],
    temperatures: Tensor | None,
    policy: WidthPolicy,
    health: DrafterHealth | None,
) -> None:
    """Tell the policy, and the watch over the drafter where that ran. All but the tree is on the host by now."""
    accepted = Accepted(read["path"], read["path_lengths"], read["tokens"])
    policy.observe(lesson.offered, read["widths"], accepted, temperatures)
    if health is not None and "record" in read:
        requests, hits, promised, *against = read["record"].sum(dim=0).tolist()
        health.observe(int(requests), hits, promised, *against)
