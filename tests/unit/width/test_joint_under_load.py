"""What `joint` promises of a live engine: no loss at any load, with a bad drafter, on a device that changes."""

from __future__ import annotations

import json

import pytest

from cast_ray.width.joint import JointWidth
from cast_ray.width.policy import WidthPolicy, make_policy
from cast_ray.width.shape import RoundShape
from tests.unit.width.simulated_engine import CONTEXT, NODES, Device, Prompts, Run, run

# Room for some twenty tokens beside one, none beside sixty-four.
LOADED = Device(lambda n: 20.0 + 0.8 * max(0, n - 24), draft=lambda batch: 3.0 + 0.3 * batch)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(1.5)


def policy_of(spec: str, device: Device = LOADED) -> WidthPolicy:
    return make_policy(spec, block_size=6, max_nodes=NODES, latency=device.table((1, 8, 64)))


def joint(device: Device = LOADED) -> JointWidth:
    return JointWidth(NODES, device.table((1, 8, 64)))


def swing(spec: str, prompts: Prompts, noise: float) -> dict[int, Run]:
    """A load of 1 and of 64 requests in turn, many times over."""
    policy, done = policy_of(spec), {1: Run(), 64: Run()}
    for turn in range(12):
        for batch, rounds in ((1, 12), (64, 8)):
            part = run(policy, LOADED, prompts, batch=batch, rounds=rounds, noise=noise, seed=turn)
            for name in ("tokens", "ms", "drafted", "nodes", "rounds"):
                setattr(done[batch], name, getattr(done[batch], name) + getattr(part, name))
    return done


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_swinging_load_is_served_as_well_as_by_the_better_rule_in_each_phase(prompts: Prompts, noise: float) -> None:
    ours, plain, fixed = (swing(spec, prompts, noise) for spec in ("joint", "ar", "fixed:15"))
    assert fixed[1].rate > 2 * plain[1].rate
    assert plain[64].rate > 2 * fixed[64].rate
    for batch in (1, 64):
        assert ours[batch].rate >= 0.98 * max(plain[batch].rate, fixed[batch].rate)


def test_plain_rounds_are_within_three_percent_of_ar_with_all_probes_counted(prompts: Prompts) -> None:
    ours = run(joint(), LOADED, prompts, batch=64, rounds=300)
    plain = run(policy_of("ar"), LOADED, prompts, batch=64, rounds=10)
    assert ours.rate >= 0.97 * plain.rate
    assert 1 < ours.drafted < 20


def test_no_load_in_between_is_served_worse_than_by_plain_rounds(prompts: Prompts) -> None:
    policy = joint()
    for batch in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64):
        run(policy, LOADED, prompts, batch=batch, rounds=12)
        ours = run(policy, LOADED, prompts, batch=batch, rounds=25, seed=5)
        plain = run(policy_of("ar"), LOADED, prompts, batch=batch, rounds=2)
        assert ours.rate >= 0.98 * plain.rate


def test_a_drafter_without_hope_is_left_and_taken_up_when_it_is_better(prompts: Prompts) -> None:
    policy = joint()
    plain = run(policy_of("ar"), LOADED, prompts, batch=1, rounds=2)
    run(policy, LOADED, prompts, batch=1, rounds=100, hopeless=True)
    lost = run(policy, LOADED, prompts, batch=1, rounds=200, hopeless=True)
    assert lost.rate >= 0.97 * plain.rate
    assert lost.drafted > 0
    run(policy, LOADED, prompts, batch=1, rounds=1500)
    again = run(policy, LOADED, prompts, batch=1, rounds=50)
    assert again.drafted == 50
    assert again.rate > 2 * plain.rate


def test_a_drafter_that_is_too_slow_rests_however_good_it_is(prompts: Prompts) -> None:
    slow = Device(LOADED.verify, draft=lambda batch: 90.0)
    ours = run(joint(slow), slow, prompts, batch=1, rounds=300)
    assert ours.drafted < 20


def test_measured_draft_times_overrule_the_table(prompts: Prompts) -> None:
    policy = joint()
    slow = Device(LOADED.verify, draft=lambda batch: 90.0)
    run(policy, slow, prompts, batch=1, rounds=40)
    assert run(policy, slow, prompts, batch=1, rounds=100).drafted < 10


def test_a_device_that_gets_steeper_gets_narrower_trees_within_a_few_rounds(prompts: Prompts) -> None:
    mild = Device(lambda n: 20.0 + 0.1 * n)
    steep = Device(lambda n: 20.0 + 1.6 * n)
    policy = joint(mild)
    before = run(policy, mild, prompts, batch=1, rounds=80)
    run(policy, steep, prompts, batch=1, rounds=60)
    after = run(policy, steep, prompts, batch=1, rounds=40)
    assert after.width < 0.7 * before.width
    run(policy, mild, prompts, batch=1, rounds=220)
    assert run(policy, mild, prompts, batch=1, rounds=40).width > 0.8 * before.width


def test_stalls_do_not_change_the_widths(prompts: Prompts) -> None:
    device = Device(lambda n: 12.0 + 0.3 * n)
    calm, shaken = joint(device), joint(device)
    run(calm, device, prompts, batch=1, rounds=100)
    run(shaken, device, prompts, batch=1, rounds=100, stall=lambda number: 80.0 if number % 20 == 7 else 1.0)
    first = run(calm, device, prompts, batch=1, rounds=60, seed=9)
    second = run(shaken, device, prompts, batch=1, rounds=60, seed=9)
    assert second.width == pytest.approx(first.width, rel=0.1)
    assert second.rate >= 0.99 * first.rate


def test_prompt_chunks_are_paid_for_by_no_candidate_and_count_by_their_tokens(prompts: Prompts) -> None:
    full = Device(lambda n: 20.0 + 0.01 * n + 8.0 * max(0, n - 100))
    policy = joint(full)
    run(policy, full, prompts, batch=1, rounds=40)
    assert policy.drafts(RoundShape([CONTEXT]))
    # Behind the bend a candidate costs more than a token's time; a chunk that reaches it leaves no room for trees.
    assert not policy.drafts(RoundShape([CONTEXT], chunk_tokens=400))


def test_reports_are_plain_values(prompts: Prompts) -> None:
    policy = joint()
    run(policy, LOADED, prompts, batch=1, rounds=40)
    run(policy, LOADED, prompts, batch=64, rounds=20)
    report = json.loads(json.dumps(policy.report()))
    assert report["width"] == "joint"
    assert report["calibrated"] is True
    assert sum(report["rounds"].values()) == 60
    assert [entry["batch"] for entry in report["chosen"]] == [1, 64]
    alone, crowd = report["chosen"]
    assert alone["nodes"] > 5 > crowd["nodes"]
    assert alone["committed_tokens"] > 1
    assert report["latency_correction"]["verify_factor"] == pytest.approx(1.0, abs=0.05)
    assert report["reliability"]["request_rounds"] > 0
