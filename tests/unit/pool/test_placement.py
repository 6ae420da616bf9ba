"""Actors ask for what the cluster has, and leave CPUs for reading and writing."""

from __future__ import annotations

from typing import Any

import pytest

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import ConfigError
from cast_ray.pool.placement import ActorPlan, NodeResources
from cast_ray.pool.placement import place as place_pool

# Ray takes nothing shorter for the id of a node.
A, B, HEAD = ("a" * 56, "b" * 56, "c" * 56)
CPU_NODE = NodeResources(A, cpus=8, gpus=0)


def place(engine: EngineConfig, pool: PoolConfig, nodes: list[NodeResources]) -> list[ActorPlan]:
    return place_pool(engine, pool, nodes).actors


def nodes_of(plans: list[ActorPlan]) -> list[str]:
    where = [plan.options["scheduling_strategy"] for plan in plans]
    assert all(strategy.soft for strategy in where)
    # Ray minds the node only of an actor that asks for something.
    assert all(plan.options["memory"] for plan in plans)
    return [strategy.node_id for strategy in where]


def test_without_gpus_one_actor_gets_every_core_and_no_logical_cpu() -> None:
    (plan,) = place(EngineConfig(), PoolConfig(), [CPU_NODE])
    assert plan.engine.threads == 8
    assert plan.engine.device == "cpu"
    assert plan.options["num_cpus"] == 0
    assert nodes_of([plan]) == [A]


def test_replicas_on_one_node_share_its_cores_and_have_one_at_least() -> None:
    assert [plan.engine.threads for plan in place(EngineConfig(), PoolConfig(replicas=3), [CPU_NODE])] == [2, 2, 2]
    assert {plan.engine.threads for plan in place(EngineConfig(), PoolConfig(replicas=20), [CPU_NODE])} == {1}


def test_replicas_spread_over_nodes_use_the_cores_of_each() -> None:
    head, other = NodeResources(HEAD, cpus=0, gpus=0), NodeResources(B, cpus=8, gpus=0)
    plans = place(EngineConfig(), PoolConfig(replicas=2), [head, CPU_NODE, other])
    assert [plan.engine.threads for plan in plans] == [8, 8]
    assert nodes_of(plans) == [A, B]
    plans = place(EngineConfig(), PoolConfig(replicas=3), [head, CPU_NODE, other])
    assert [plan.engine.threads for plan in plans] == [4, 4, 4]
    assert nodes_of(plans) == [A, B, A]


def test_a_cluster_without_cpus_still_gets_its_engine() -> None:
    plans = place(EngineConfig(), PoolConfig(), [NodeResources(HEAD, cpus=0, gpus=0)])
    assert [plan.engine.threads for plan in plans] == [1]
    assert nodes_of(plans) == [HEAD]


def test_threads_that_were_set_stay_as_they_are() -> None:
    (plan,) = place(EngineConfig(threads=3), PoolConfig(), [CPU_NODE])
    assert plan.engine.threads == 3


def test_every_gpu_gets_an_actor() -> None:
    plans = place(EngineConfig(), PoolConfig(), [NodeResources(A, 16, 2), NodeResources(B, 16, 1)])
    assert [plan.options["num_gpus"] for plan in plans] == [1, 1, 1]
    assert {plan.engine.device for plan in plans} == {"cuda"}
    assert [plan.name for plan in plans] == ["engine-0", "engine-1", "engine-2"]


def test_a_cpu_engine_on_a_gpu_node_takes_no_gpu() -> None:
    (plan,) = place(EngineConfig(device="cpu"), PoolConfig(), [NodeResources(A, 16, 2)])
    assert plan.options["num_gpus"] == 0
    assert plan.engine.device == "cpu"


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("auto", 2)])
def test_more_replicas_than_gpus_is_an_error_rather_than_a_wait(device: str, gpus: int) -> None:
    with pytest.raises(ConfigError, match=rf"pool.replicas=3: needs a GPU each, and the cluster has {gpus}"):
        place(EngineConfig(device=device), PoolConfig(replicas=3), [NodeResources(A, 16, gpus)])


def groups(*some: dict[str, Any], **settings: Any) -> PoolConfig:
    return PoolConfig(groups=some, **settings)


FAST = NodeResources(A, cpus=16, gpus=2, custom={"accelerator_type:H100": 1.0, "fast": 2.0})
SLOW = NodeResources(B, cpus=16, gpus=1, custom={"accelerator_type:T4": 1.0})


def test_every_group_gets_its_own_device_and_settings() -> None:
    pool = groups(
        {"name": "fast", "accelerator_type": "H100", "engine": {"max_batch_size": 64}},
        {"name": "slow", "accelerator_type": "T4", "engine": {"max_batch_size": 8, "dtype": "float32"}},
        {"name": "cores", "count": 2, "engine": {"device": "cpu", "threads": 4}},
    )
    plans = place(EngineConfig(), pool, [FAST, SLOW])
    assert [plan.name for plan in plans] == ["fast-0", "fast-1", "slow-0", "cores-0", "cores-1"]
    assert [plan.engine.max_batch_size for plan in plans] == [64, 64, 8, 16, 16]
    assert [plan.engine.device for plan in plans] == ["cuda"] * 3 + ["cpu"] * 2
    assert [plan.options.get("accelerator_type") for plan in plans] == ["H100", "H100", "T4", None, None]
    assert [plan.options["num_gpus"] for plan in plans] == [1, 1, 1, 0, 0]
    assert plans[2].engine.dtype == "float32"
    assert nodes_of(plans[3:]) == [A, B]


def test_a_group_by_custom_resource_asks_for_it_and_for_a_gpu_only_where_there_are_some() -> None:
    (plan,) = place(EngineConfig(), groups({"name": "x", "resources": {"fast": 2}}), [FAST])
    assert plan.options["resources"] == {"fast": 2}
    assert plan.options["num_gpus"] == 1
    here = NodeResources(A, cpus=4, gpus=0, custom={"big": 1.0})
    (plan,) = place(EngineConfig(), groups({"name": "x", "resources": {"big": 1}, "num_cpus": 2}), [here])
    assert plan.options["num_gpus"] == 0
    assert plan.options["num_cpus"] == 2
    assert (plan.engine.device, plan.engine.threads) == ("cpu", 2)


def test_a_count_without_room_is_an_error_and_a_max_waits() -> None:
    with pytest.raises(ConfigError, match=r"pool.groups.fast.count=3: .* room for 2"):
        place(EngineConfig(), groups({"name": "fast", "accelerator_type": "H100", "count": 3}), [FAST, SLOW])
    plans = place(EngineConfig(), groups({"name": "f", "accelerator_type": "H100", "min": 1, "max": 3}), [FAST, SLOW])
    assert [(plan.needed, plan.optional) for plan in plans] == [(True, False), (False, True), (False, True)]


def test_groups_that_share_a_node_do_not_plan_its_gpus_twice() -> None:
    pool = groups({"name": "a", "resources": {"fast": 0.5}, "count": 2}, {"name": "b", "accelerator_type": "H100"})
    with pytest.raises(ConfigError, match=r"pool.groups.b.count=None: is left open, and no node has"):
        place(EngineConfig(), pool, [FAST])


def test_an_unknown_accelerator_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"accelerator_type='H1000': is no accelerator .* Here: H100, T4"):
        place(EngineConfig(), groups({"name": "a", "accelerator_type": "H1000"}), [FAST, SLOW])


def test_engines_leave_cpus_for_reading_and_writing() -> None:
    node = NodeResources(A, cpus=8, gpus=0)
    pool = groups({"name": "a", "num_cpus": 2, "min": 1, "max": 4})
    plan = place_pool(EngineConfig(), pool, [node])
    assert len(plan.actors) == 3
    assert "4 actors of 2 CPUs would leave fewer than 2 CPUs for reading and writing; 3 are started" in plan.warnings[0]
    with pytest.raises(ConfigError, match=r"pool.groups.a.num_cpus=8.0: 1 actors of 8 CPUs would leave fewer than 2"):
        place_pool(EngineConfig(), groups({"name": "a", "num_cpus": 8, "count": 1}), [node])


def test_groups_answer_with_the_jobs_own_target() -> None:
    pool = groups({"name": "other", "count": 1, "engine": {"target": "other/model"}})
    with pytest.raises(ConfigError, match=r"pool\.groups\.other\.engine\.target='other/model': is another target"):
        place(EngineConfig(), pool, [FAST])
    same = groups({"name": "same", "count": 1, "engine": {"target": "embedded", "drafter": "none"}})
    assert place(EngineConfig(), same, [FAST])[0].engine.drafter == "none"
