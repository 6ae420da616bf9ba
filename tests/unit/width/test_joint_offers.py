"""`joint` with candidates that are at hand without drafting: the drafter runs only where it adds what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cast_ray.trees.accept import Accepted
from cast_ray.trees.merge import Offer, merge
from cast_ray.width.joint import JointWidth
from cast_ray.width.shape import RoundShape, RoundTimes
from tests.unit.width.simulated_engine import CONTEXT, HOST_MS, NODES, Device, Prompts, run

DEVICE = Device(lambda n: 20.0 + 0.2 * n, draft=lambda batch: 4.0 + 0.3 * batch)
CPU = torch.device("cpu")


def offer_of(batch: int, edge: float, deep: int, only: int | None = None) -> Offer:
    """A chain `deep` long in every request, or in one alone; each token right with probability `edge`."""
    counts = np.array([deep if only in (None, b) else 0 for b in range(batch)])
    real = np.arange(deep) < counts[:, None]
    places = np.broadcast_to(np.arange(deep), real.shape)
    return Offer(
        tokens=np.where(real, places + 100, 0),
        parents=np.where(real, places - 1, -1),
        depths=np.where(real, places + 1, 0),
        masses=np.where(real, edge ** (places + 1.0), 0.0),
        sources=np.where(real, 1, 0),
        counts=counts,
    )


def settled(batch: int) -> JointWidth:
    policy = JointWidth(NODES, DEVICE.table((1, 8, 64)))
    run(policy, DEVICE, Prompts(1.5), batch=batch, rounds=60)
    return policy


def shape_of(batch: int, offer: Offer | None) -> RoundShape:
    return RoundShape([CONTEXT] * batch, offer=offer)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_sure_copy_is_verified_without_drafting_and_a_doubtful_one_is_not_enough(batch: int) -> None:
    policy = settled(batch)
    assert policy.drafts(shape_of(batch, None))
    assert policy.drafts(shape_of(batch, offer_of(batch, 0.1, 4)))
    sure = offer_of(batch, 0.98, 30)
    assert not policy.drafts(shape_of(batch, sure))
    widths = policy.choose(sure.to_tree(CPU), replace(shape_of(batch, sure), drafted=False))
    assert (widths >= 20).all()


def test_one_request_with_a_copy_among_many_does_not_stop_drafting_for_the_others() -> None:
    policy = settled(8)
    assert policy.drafts(shape_of(8, offer_of(8, 0.98, 30, only=3)))


def test_where_drafting_does_not_pay_candidates_at_hand_still_do() -> None:
    dear = Device(lambda n: 20.0 + 0.2 * n, draft=lambda batch: 60.0)
    policy = JointWidth(NODES, dear.table((1, 8, 64)))
    run(policy, dear, Prompts(1.5), batch=8, rounds=80)
    assert not policy.drafts(shape_of(8, None))
    offer = offer_of(8, 0.7, 10)
    assert not policy.drafts(shape_of(8, offer))
    widths = policy.choose(offer.to_tree(CPU), replace(shape_of(8, offer), drafted=False))
    assert int(widths.sum()) > 8


def test_worthless_candidates_at_hand_leave_the_round_plain() -> None:
    steep = Device(lambda n: 20.0 + 3.0 * n, draft=lambda batch: 60.0)
    policy = JointWidth(NODES, steep.table((1, 8, 64)))
    offer = offer_of(8, 0.03, 10)
    widths = policy.choose(offer.to_tree(CPU), replace(shape_of(8, offer), drafted=False))
    assert not widths.any()


def test_without_any_drafter_the_width_follows_what_is_offered() -> None:
    policy = JointWidth(NODES, DEVICE.table((1, 8, 64)))
    chosen = {}
    for edge in (0.2, 0.6, 0.95):
        for _ in range(20):
            shape = replace(shape_of(1, offer_of(1, edge, 40)), drafted=False)
            assert shape.offer is not None
            widths = policy.choose(shape.offer.to_tree(CPU), shape)
            policy.timed(RoundTimes(shape, 1 + int(widths[0]), False, 0.0, 22.0, HOST_MS, 1))
        chosen[edge] = int(widths[0])
    assert chosen[0.2] < chosen[0.6] < chosen[0.95]
    assert policy.report()["rounds"]["offered"] == 60


def test_a_source_beside_the_drafter_is_corrected_by_its_own_record() -> None:
    """Where another source disagrees with the drafter, here it is always wrong: its candidates lose their weight, the
    drafter's do not."""
    policy = settled(1)
    prompts, rng = Prompts(1.5), np.random.default_rng(5)
    shape = shape_of(1, offer_of(1, 0.6, 3))
    assert shape.offer is not None
    weights = []
    for _ in range(80):
        tree, _, target = prompts.draw(1, rng)
        merged = merge(tree, shape.offer, NODES)
        policy.choose(merged, shape)
        expected = policy._expected[0]
        assert merged.origins is not None
        others = (merged.origins.sources[0] > 0).numpy()
        weights.append((expected[others].sum(), expected[~others].sum()))
        nobody = Accepted(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), target[:, :1])
        # The drafter's likeliest token is right every second time; the other's never.
        best = int((~merged.origins.sources[0].bool()).nonzero()[0])
        path = torch.tensor([[0, best + 1]])
        took = Accepted(path, torch.tensor([2]), torch.zeros(1, 2, dtype=torch.int64))
        policy.observe(merged, torch.tensor([merged.max_nodes]), took if rng.random() < 0.5 else nobody, None)
        policy.timed(RoundTimes(shape, 1 + NODES, True, 4.0, 25.0, HOST_MS, 1))
    assert weights[-1][0] < 0.3 * weights[0][0]
    assert weights[-1][1] > 2 * weights[-1][0]
