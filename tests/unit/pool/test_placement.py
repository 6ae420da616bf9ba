"""Actors ask for what the cluster has, and leave CPUs for reading and writing."""

from __future__ import annotations

import pytest

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import ConfigError
from cast_ray.pool.placement import ActorPlan, NodeResources, place

# Ray takes nothing shorter for the id of a node.
A, B, HEAD = ("a" * 56, "b" * 56, "c" * 56)
CPU_NODE = NodeResources(A, cpus=8, gpus=0)


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
