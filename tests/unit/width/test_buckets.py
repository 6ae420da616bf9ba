"""Buckets of captured forwards: which one a forward falls in, and widths chosen at their ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cast_ray.errors import ConfigError
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.buckets import Buckets
from cast_ray.width.deployment import DeploymentWidth
from cast_ray.width.joint import JointWidth
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from cast_ray.width.shape import RoundShape, RoundTimes

BUCKETS = Buckets((1, 2, 4, 8, 16, 24, 32, 48, 64, 96), (1, 2, 4, 6, 8))
NODES, CONTEXT, HOST_MS, DRAFT_MS = 40, 200, 0.5, 2.0


def test_a_forward_falls_in_the_next_bucket_with_a_request_of_padding_where_rows_are_padded() -> None:
    assert BUCKETS.find(8, 2) == (8, 2)
    assert BUCKETS.find(7, 2) == (8, 4)
    assert BUCKETS.find(8, 3) == (8, 4)
    assert BUCKETS.find(96, 8) == (96, 8)
    assert BUCKETS.find(95, 8) is None
    assert BUCKETS.find(97, 1) is None
    for tokens in range(1, 97):
        for batch in range(1, min(tokens, 7) + 1):
            padded, requests = BUCKETS.find(tokens, batch) or pytest.fail("no bucket")
            assert padded >= tokens
            assert requests >= batch + (padded > tokens)


def test_sizes_reach_what_an_engine_may_ask_for_and_stop_at_a_thousand_tokens() -> None:
    buckets = Buckets.up_to(16 * 64, 16)
    assert buckets.tokens[-1] == 1024
    assert buckets.batches[-1] == 24
    assert Buckets.up_to(10**6, 3).tokens[-1] == 1024
    assert Buckets.up_to(17, 1) == Buckets((1, 2, 4, 8, 16, 24), (1, 2))
    assert BUCKETS.padded(np.array([1.0, 3.0, 9.0, 96.0, 97.0, 500.0])).tolist() == [1, 4, 16, 96, 97, 500]


@pytest.mark.parametrize("tokens", [(), (0, 1), (4, 2)])
def test_sizes_out_of_order_are_named(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"buckets\.tokens"):
        Buckets(tokens, (1,))
    with pytest.raises(ConfigError, match="buckets"):
        Buckets.from_list([[1, 2]])


def true_ms(tokens: int) -> float:
    """What a forward takes: reading weights, and a little for each row of the bucket."""
    return 10.0 + 0.12 * float(BUCKETS.padded(np.array(float(tokens))))


def table() -> LatencyTable:
    points = [LatencyPoint(tokens, 1, CONTEXT, true_ms(tokens)) for tokens in BUCKETS.tokens]
    points += [LatencyPoint(tokens, 4, CONTEXT, true_ms(tokens)) for tokens in (4, 16, 32, 64, 96)]
    drafts = [DraftPoint(batch, CONTEXT, DRAFT_MS) for batch in (1, 4)]
    return LatencyTable(points, drafts, HOST_MS, BUCKETS)


def test_predicted_times_are_a_step_function_that_survives_saving() -> None:
    for known in (table(), LatencyTable.from_dict(table().to_dict())):
        found = known.verify_ms(np.arange(1, 97), 1, CONTEXT)
        np.testing.assert_allclose(found, [true_ms(n) for n in range(1, 97)])
        # Forwards with prompt chunks are not captured: theirs is the line between.
        assert known.verify_ms([40], 1, CONTEXT, eager=True)[0] == pytest.approx((true_ms(32) + true_ms(48)) / 2)


def test_a_point_measured_inside_a_bucket_is_the_time_of_the_bucket() -> None:
    known = LatencyTable([LatencyPoint(7, 1, CONTEXT, 5.0), LatencyPoint(20, 1, CONTEXT, 9.0)], buckets=BUCKETS)
    assert known.verify_ms([5, 8, 17, 24], 1, CONTEXT).tolist() == pytest.approx([5.0, 5.0, 9.0, 9.0])


def trees(batch: int, quality: float) -> CandidateTree:
    places = torch.arange(NODES).expand(batch, NODES)
    share = torch.linspace(1.0, 0.6, batch)[:, None]
    masses = (share * quality * 0.93**places).float()
    return CandidateTree(places, places - 1, places + 1, masses, torch.full((batch,), NODES), NODES)


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("quality", [0.9, 0.5])
@pytest.mark.parametrize("factor", [1.0, 1.6])
def test_joint_ends_its_widths_at_the_end_of_a_bucket(batch: int, quality: float, factor: float) -> None:
    policy, tree, shape = JointWidth(NODES, table()), trees(batch, quality), RoundShape([CONTEXT] * batch)
    ends = set()
    # A device that has become slower is corrected for, and no correction may draw a slope inside a bucket.
    for turn in range(40):
        tokens = int(policy.choose(tree, shape).sum()) + batch
        if turn >= 20:
            ends.add(tokens)
        policy.timed(RoundTimes(shape, tokens, True, DRAFT_MS, factor * true_ms(tokens), HOST_MS, batch))
    assert all(end in BUCKETS.tokens or end == batch * (NODES + 1) for end in ends), ends


def test_deployment_does_so_too() -> None:
    policy = DeploymentWidth(NODES, table())
    # While it calibrates: the widest whose forward is still cheap.
    assert policy.width(1, CONTEXT) + 1 in BUCKETS.tokens
