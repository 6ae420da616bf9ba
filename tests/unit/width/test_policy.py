"""What the width policies promise: the widths that their names say, and for `deployment` the best one there is."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cast_ray.errors import ConfigError
from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.deployment import CALIBRATION_ROUNDS, DeploymentWidth
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from cast_ray.width.policy import make_policy, needs_latency
from cast_ray.width.shape import RoundShape
from tests.unit.width.simulated_rounds import World, true_round_lengths, verify

NODES = 63
DEVICES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 10.0,
    "linear": lambda n: 5.0 + 0.2 * n,
    "steep": lambda n: 3.0 * n,
    "convex": lambda n: 10.0 + 0.004 * n * n,
    "steps": lambda n: 10.0 + 3.0 * sum(n > edge for edge in (16, 32, 64)),
    "cliff": lambda n: 10.0 if n <= 40 else 60.0,
    "slow_start": lambda n: 12.0 if n < 4 else 9.0 + 0.05 * n,
}


def table(ms: Callable[[int], float], draft_ms: float = 1.5, batches: tuple[int, ...] = (1,)) -> LatencyTable:
    points = [
        LatencyPoint(tokens, batch, 256, ms(tokens))
        for batch in batches
        for tokens in range(batch, batch * (NODES + 1) + 1, batch)
    ]
    return LatencyTable(points, [DraftPoint(1, 256, draft_ms)], host_ms=0.5)


def best_width(lengths: np.ndarray, latency: LatencyTable, batch: int) -> int:
    """By looking at every N."""
    rates = [lengths[0] / float(latency.round_ms(0, batch, 256, drafting=False))]
    rates += [lengths[n] / float(latency.round_ms(n, batch, 256, drafting=True)) for n in range(1, len(lengths))]
    return int(np.argmax(rates))


ALONE = RoundShape([256])


def chain(masses: torch.Tensor, counts: torch.Tensor) -> CandidateTree:
    """[B, N] masses as trees of one branch."""
    places = torch.arange(masses.shape[1]).expand(masses.shape).contiguous()
    return CandidateTree(places, places - 1, places + 1, masses, counts, masses.shape[1])


def teach(policy: DeploymentWidth, acceptance: np.ndarray, rounds: int = 1000) -> None:
    """Rounds in which the shares of accepted ranks are exactly `acceptance`, as far as the policy verifies them."""
    masses = torch.tensor(acceptance, dtype=torch.float32).expand(rounds, -1).contiguous()
    tree = chain(masses, torch.full((rounds,), NODES))
    widths = policy.choose(tree, ALONE)
    ranks = torch.arange(1, NODES + 1)
    hit = torch.arange(rounds)[:, None] < torch.tensor(np.round(acceptance * rounds)).long()
    hit &= ranks <= widths[:, None]
    path = torch.nn.functional.pad(ranks * hit, (1, 0))
    policy.observe(tree, widths, Accepted(path, hit.sum(dim=1) + 1, path), None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quality", [0.9, 0.5, 0.02])
def test_deployment_finds_the_optimum_of_an_exhaustive_search(device: str, quality: float) -> None:
    acceptance = np.round(quality * 0.93 ** np.arange(NODES), 3)
    latency = table(DEVICES[device])
    policy = DeploymentWidth(NODES, latency)
    teach(policy, acceptance)
    lengths = 1.0 + np.concatenate([[0.0], acceptance.cumsum()])
    assert policy.width(1, 256) == best_width(lengths, latency, 1)


def test_the_devices_of_these_tests_ask_for_unlike_widths() -> None:
    lengths = 1.0 + np.concatenate([[0.0], (0.9 * 0.93 ** np.arange(NODES)).cumsum()])
    widths = {name: best_width(lengths, table(ms), 1) for name, ms in DEVICES.items()}
    assert widths["flat"] == NODES
    assert widths["cliff"] == 39
    assert widths["steps"] in (31, 63)
    assert len(set(widths.values())) >= 5
    poor = 1.0 + np.concatenate([[0.0], (0.02 * 0.93 ** np.arange(NODES)).cumsum()])
    assert best_width(poor, table(DEVICES["steep"]), 1) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 8])
def test_deployment_comes_within_three_percent_of_the_best_rate_with_an_over_confident_drafter(
    device: str, batch: int
) -> None:
    latency = table(DEVICES[device], batches=(1, 8))
    truth = true_round_lengths(sharpness=2.0, nodes=NODES)
    world, policy = World(2, 2.0, NODES), DeploymentWidth(NODES, latency)
    for _ in range(80):
        shape = RoundShape([256] * batch)
        if not policy.drafts(shape):
            break
        tree, _, target = world.round(48)
        widths = policy.choose(tree, shape)
        policy.observe(tree, widths, verify(tree, target, widths), None)

    def rate(nodes: int) -> float:
        return float(truth[nodes] / latency.round_ms(nodes, batch, 256, drafting=nodes > 0))

    assert rate(policy.width(batch, 256)) >= 0.97 * rate(best_width(truth, latency, batch))


def test_a_loaded_device_gets_narrower_trees() -> None:
    latency = table(DEVICES["convex"], batches=(1, 8))
    policy = DeploymentWidth(NODES, latency)
    teach(policy, np.round(0.9 * 0.93 ** np.arange(NODES), 3))
    assert 0 < policy.width(8, 256) < policy.width(1, 256)


def test_calibration_verifies_what_costs_at_most_half_a_forward_more() -> None:
    latency = table(DEVICES["linear"])  # 5.2 ms at one token: 1.5 times that is 7.8, at 14 tokens
    policy = DeploymentWidth(NODES, latency)
    counts = torch.tensor([NODES, 4])
    assert policy.drafts(ALONE)
    assert policy.choose(chain(torch.zeros(2, NODES), counts), ALONE).tolist() == [13, 4]
    assert DeploymentWidth(NODES, table(DEVICES["steep"])).width(1, 256) == 1
    assert policy.report()["calibrated"] is False


def test_a_width_is_settled_after_calibration_and_reconsidered_when_rounds_have_doubled() -> None:
    policy = DeploymentWidth(NODES, table(DEVICES["linear"]))
    good = np.round(0.9 * 0.93 ** np.arange(NODES), 3)
    calibration = policy.width(1, 256)
    teach(policy, good, CALIBRATION_ROUNDS - 1)
    assert policy.width(1, 256) == calibration
    teach(policy, good, 1)
    lucky = policy.width(1, 256)
    assert lucky != calibration

    masses = torch.tensor(good, dtype=torch.float32)[None]
    tree, widths, path = (
        chain(masses, torch.tensor([NODES])),
        torch.tensor([NODES]),
        torch.zeros(1, 1, dtype=torch.int64),
    )
    for _ in range(CALIBRATION_ROUNDS - 1):
        policy.observe(tree, widths, Accepted(path, torch.tensor([1]), path), None)
    assert policy.width(1, 256) == lucky
    policy.observe(tree, widths, Accepted(path, torch.tensor([1]), path), None)
    assert policy.width(1, 256) < lucky


def test_where_drafting_does_not_pay_the_drafter_rests() -> None:
    policy = DeploymentWidth(NODES, table(DEVICES["steep"], draft_ms=20.0))
    teach(policy, np.round(0.3 * 0.9 ** np.arange(NODES), 3))
    assert not policy.drafts(ALONE)
    assert policy.choose(chain(torch.ones(1, NODES), torch.tensor([NODES])), ALONE).tolist() == [0]


@pytest.mark.parametrize(
    ("spec", "nodes", "branching"),
    [("ar", 0, False), ("chain", 7, False), ("fixed:31", 31, True), ("fixed:1", 1, True)],
)
def test_a_named_width_is_the_width_of_every_round(spec: str, nodes: int, branching: bool) -> None:
    policy = make_policy(spec, block_size=8, max_nodes=63, latency=None)
    assert (policy.name, policy.max_nodes, policy.branching) == (spec, nodes, branching)
    shape = RoundShape([0, 10, 1000])
    assert policy.drafts(shape) == (nodes > 0)
    tree = chain(torch.zeros(3, 63), torch.tensor([63, 20, 0]))
    assert policy.choose(tree, shape).tolist() == [min(nodes, c) for c in (63, 20, 0)]
    assert policy.report() == {"width": spec, "max_nodes": nodes}


def test_autoregressive_decoding_needs_no_drafter_and_deployment_a_latency_table() -> None:
    assert make_policy("ar", block_size=None, max_nodes=63, latency=None).max_nodes == 0
    assert all(map(needs_latency, ("deployment", "round", "joint")))
    assert not any(map(needs_latency, ("ar", "chain", "fixed:31")))


def test_the_chain_is_cut_to_the_widest_tree_allowed() -> None:
    assert make_policy("chain", block_size=16, max_nodes=4, latency=None).max_nodes == 4


@pytest.mark.parametrize(
    ("spec", "block_size", "has_latency", "message"),
    [
        ("wide", 8, True, "width='wide': is no known policy. Known: ar, chain, fixed:N .*, deployment, round, joint"),
        ("", 8, True, "width='': is no known policy"),
        ("fixed", 8, True, "width='fixed': is no known policy"),
        ("ar:3", 8, True, "width='ar:3': is no known policy"),
        ("fixed:", 8, True, "width='fixed:': needs a whole number of nodes"),
        ("fixed:0", 8, True, "width='fixed:0': needs a whole number of nodes of at least 1"),
        ("fixed:-3", 8, True, "width='fixed:-3': needs a whole number of nodes"),
        ("fixed:x", 8, True, "width='fixed:x': needs a whole number of nodes"),
        ("fixed:64", 8, True, "width='fixed:64': is wider than max_nodes=63. Raise max_nodes to 64"),
        ("fixed:31", None, True, 'width=.fixed:31.: needs a drafter.*Set width="ar"'),
        ("chain", None, True, 'needs a drafter.*Set width="ar"'),
        ("chain", 1, True, "needs a drafter that drafts at least one token"),
        ("deployment", None, True, 'needs a drafter.*Set width="ar"'),
        ("joint", None, True, 'needs a drafter.*Set width="ar"'),
        ("joint", 8, False, "width='joint': needs this device's latency table"),
        ("joint:3", 8, True, "width='joint:3': is no known policy"),
        ("round", 8, False, "width='round': needs this device's latency table"),
        ("deployment", 8, False, "width='deployment': needs this device's latency table"),
    ],
)
def test_a_width_that_cannot_be_used_says_why_and_what_to_do(
    spec: str, block_size: int | None, has_latency: bool, message: str
) -> None:
    latency = table(DEVICES["flat"]) if has_latency else None
    with pytest.raises(ConfigError, match=message):
        make_policy(spec, block_size=block_size, max_nodes=63, latency=latency)


@pytest.mark.parametrize("spec", ["deployment", "round", "joint"])
def test_a_measuring_rule_refuses_a_table_without_the_drafters_time(spec: str) -> None:
    latency = LatencyTable([LatencyPoint(1, 1, 256, 5.0)])
    with pytest.raises(ConfigError, match="holds the drafter's time"):
        make_policy(spec, block_size=8, max_nodes=63, latency=latency)


def test_deployment_reports_plain_values() -> None:
    policy = make_policy("deployment", block_size=8, max_nodes=NODES, latency=table(DEVICES["steps"]))
    assert isinstance(policy, DeploymentWidth)
    teach(policy, np.round(0.9 * 0.93 ** np.arange(NODES), 3))
    nodes = policy.width(1, 300)
    report = json.loads(json.dumps(policy.report()))
    assert report["calibrated"] is True
    assert report["rounds"] == 1000
    (chosen,) = report["chosen"]
    assert (chosen["batch"], chosen["context"], chosen["nodes"]) == (1, 256, nodes)
    assert chosen["expected_round_length"] > 1
    assert chosen["expected_round_ms"] > 0
