"""The width rules on synthetic devices: what `joint` gets out of each, and what a convex stop rule leaves behind.

Throughput here is expected tokens over true times, so that neither a lucky draw nor a noisy clock decides a test.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from cast_ray.trees.tree import CandidateTree
from cast_ray.width.joint import JointWidth
from cast_ray.width.policy import make_policy
from cast_ray.width.shape import RoundShape, RoundTimes
from tests.unit.width.simulated_engine import CONTEXT, HOST_MS, NODES, Device, Prompts, run

DEVICES = {
    "flat": Device(lambda n: 20.0),
    "linear": Device(lambda n: 12.0 + 0.3 * n),
    "convex": Device(lambda n: 14.0 + 0.006 * n * n),
    "steps": Device(lambda n: 14.0 + 5.0 * sum(n > edge for edge in (16, 32, 64, 96, 128))),
    "dip": Device(lambda n: 14.0 + 0.25 * n - 5.0 * (24 <= n <= 28)),
    # Blackwell, 8B: nearly flat, then up by a quarter within a few tokens.
    "cliff": Device(lambda n: 21.0 + 0.05 * n + 6.0 * (n > 48), draft=lambda batch: 4.6),
}


prompts_of = functools.cache(Prompts)


def profile(quality: float, fade: float = 0.9) -> np.ndarray:
    return quality * fade ** np.arange(NODES)


def width_of(policy: JointWidth, device: Device, masses: np.ndarray) -> int:
    """The width that the policy settles on where every draft has these masses and no time is off."""
    places = torch.arange(NODES)[None]
    tree = CandidateTree(
        places, places - 1, places + 1, torch.tensor(masses)[None].float(), torch.tensor([NODES]), NODES
    )
    shape = RoundShape([CONTEXT])
    for _ in range(20):
        width = int(policy.choose(tree, shape)[0])
        verify_ms = device.verify(1 + width)
        policy.timed(RoundTimes(shape, 1 + width, True, device.draft(1), verify_ms, HOST_MS, 1))
    return width


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quality", [0.95, 0.6, 0.2])
def test_joint_finds_the_optimum_of_an_exhaustive_search(device: str, quality: float) -> None:
    built, masses = DEVICES[device], profile(quality)
    lengths = 1 + np.concatenate([[0.0], masses.cumsum()])
    times = [built.verify(1 + n) + built.draft(1) + HOST_MS for n in range(NODES + 1)]
    rates = lengths / np.array(times)
    found = width_of(JointWidth(NODES, built.table()), built, masses)
    assert rates[found] == pytest.approx(rates.max(), rel=1e-6)


@functools.cache
def rate_of(spec: str, device: str, sharpness: float = 1.0, noise: float = 0.0, seed: int = 0) -> float:
    """Expected tokens per ms after the policy has learnt for a while."""
    built, prompts = DEVICES[device], prompts_of(sharpness)
    policy = make_policy(spec, block_size=6, max_nodes=NODES, latency=built.table(noise=noise, seed=seed))
    if spec == "joint":
        run(policy, built, prompts, batch=1, rounds=80, noise=noise, seed=seed)
    return run(policy, built, prompts, batch=1, rounds=80, noise=noise, seed=100).rate


@pytest.mark.parametrize("device", DEVICES)
def test_with_ten_percent_noise_joint_stays_within_two_percent(device: str) -> None:
    noisy = [rate_of("joint", device, noise=0.1, seed=seed) for seed in range(2)]
    assert np.mean(noisy) >= 0.98 * rate_of("joint", device)


@pytest.mark.parametrize("device", DEVICES)
def test_joint_is_level_with_the_best_fixed_width_or_above(device: str) -> None:
    """With an over-confident drafter."""
    fixed = max(rate_of(f"fixed:{n}", device, sharpness=2.0) for n in (15, 31, 63))
    assert rate_of("joint", device, sharpness=2.0) >= 0.98 * fixed


@pytest.mark.parametrize("device", ["steps", "dip"])
def test_a_convex_fit_and_its_stop_rule_do_worse_on_a_real_curve(device: str) -> None:
    assert rate_of("round", device) < 0.97 * rate_of("joint", device)


def test_on_a_convex_curve_the_convex_rule_is_as_good() -> None:
    assert rate_of("round", "convex") > 0.98 * rate_of("joint", "convex")
