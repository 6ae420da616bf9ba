"""How many engine actors a cluster gets, and with which resources.

Pure: it reads a picture of the cluster and starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cast_ray.config import EngineConfig, PoolConfig
from cast_ray.errors import ConfigError, describe


@dataclass(frozen=True)
class NodeResources:
    """One live node: its id, and its CPUs and GPUs as Ray counts them."""

    node: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class ActorPlan:
    """One engine actor: its name, its engine's settings, and Ray's options for it."""

    name: str
    engine: EngineConfig
    options: dict[str, Any]


def place(engine: EngineConfig, pool: PoolConfig, nodes: Sequence[NodeResources]) -> list[ActorPlan]:
    """A plan for every actor. Raises ConfigError where the cluster cannot hold them, since Ray would wait for ever."""
    gpus = int(sum(node.gpus for node in nodes))
    wants_gpu = engine.device.startswith("cuda") or (engine.device == "auto" and gpus > 0)
    if wants_gpu:
        replicas = pool.replicas or max(1, gpus)
        if replicas > gpus:
            problem = f"needs a GPU each, and the cluster has {gpus}"
            remedy = "Lower replicas, or set engine.device to cpu" if gpus else "Set engine.device to cpu or auto"
            raise ConfigError(describe("pool.replicas", replicas, problem, remedy))
        # Ray shows each actor its own GPU as device 0.
        return [
            ActorPlan(f"engine-{i}", engine.replace(device="cuda"), {"num_gpus": 1, "num_cpus": 0})
            for i in range(replicas)
        ]
    replicas = pool.replicas or 1
    computing = [node for node in nodes if node.cpus >= 1] or list(nodes)
    changes: dict[str, Any] = {"device": "cpu"}
    if engine.threads is None:
        # Ray tells a worker of less than one CPU to use one thread, so say how many.
        per_node = -(-replicas // len(computing))
        changes["threads"] = max(1, int(min(node.cpus for node in computing)) // per_node)
    plans = []
    for i in range(replicas):
        # Each to its node by name: to Ray an actor that asks for no CPU may as well go to a node that has none, or
        # beside another one. Soft, so that it starts again elsewhere when its node is lost.
        where = NodeAffinitySchedulingStrategy(computing[i % len(computing)].node, soft=True)
        # No logical CPUs: engines that held them all would leave none for reading and writing, and the job would hang.
        # A byte of memory, since Ray (2.60) sends an actor that asks for nothing anywhere, whatever node is named.
        options = {"num_gpus": 0, "num_cpus": 0, "memory": 1, "scheduling_strategy": where}
        plans.append(ActorPlan(f"engine-{i}", engine.replace(**changes), options))
    return plans
