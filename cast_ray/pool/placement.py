"""How many engine actors a cluster gets, and with which resources.

Pure: it reads a picture of the cluster and starts nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util.accelerators import accelerators as _accelerators
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cast_ray.config import EngineConfig, GroupConfig, PoolConfig
from cast_ray.errors import ConfigError, describe

# CPUs that engines leave for reading and writing, whatever they ask for.
SPARE_CPUS = 2
_DEFAULT_GROUP = "engine"
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True)
class NodeResources:
    """One live node: its id, its CPUs and GPUs as Ray counts them, and its other resources by name."""

    node: str
    cpus: float
    gpus: float
    custom: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ActorPlan:
    """One engine actor: its name, its group, its engine's settings, and Ray's options for it.

    needed: the job does not begin before it is ready or has failed (a group's `min`).
    optional: the job does not wait for it (what a group may have beyond its `min`).
    """

    name: str
    engine: EngineConfig
    options: dict[str, Any]
    group: str = _DEFAULT_GROUP
    needed: bool = False
    optional: bool = False


@dataclass(frozen=True)
class PoolPlan:
    """Every actor, and what a person should know of how it came about."""

    actors: list[ActorPlan]
    warnings: list[str] = field(default_factory=list)


def place(engine: EngineConfig, pool: PoolConfig, nodes: Sequence[NodeResources]) -> PoolPlan:
    """A plan for every actor. Raises ConfigError where the cluster cannot hold them, since Ray would wait for ever."""
    if pool.groups:
        return _place_groups(engine, pool.groups, nodes)
    gpus = int(sum(node.gpus for node in nodes))
    wants_gpu = engine.device.startswith("cuda") or (engine.device == "auto" and gpus > 0)
    if wants_gpu:
        replicas = pool.replicas or max(1, gpus)
        if replicas > gpus:
            problem = f"needs a GPU each, and the cluster has {gpus}"
            remedy = "Lower replicas, or set engine.device to cpu" if gpus else "Set engine.device to cpu or auto"
            raise ConfigError(describe("pool.replicas", replicas, problem, remedy))
        # Ray shows each actor its own GPU as device 0.
        return PoolPlan(
            [
                ActorPlan(f"engine-{i}", engine.replace(device="cuda"), {"num_gpus": 1, "num_cpus": 0})
                for i in range(replicas)
            ]
        )
    replicas = pool.replicas or 1
    homes = _round_robin(_computing(nodes), replicas)
    threads = _threads(engine, homes, nodes)
    return PoolPlan(
        [
            ActorPlan(f"engine-{i}", engine.replace(device="cpu", threads=threads), _on_cpu(home))
            for i, home in enumerate(homes)
        ]
    )


def threads_each(engine: EngineConfig, count: int, nodes: Sequence[NodeResources]) -> int:
    """CPU threads of each of `count` engines that are spread over the nodes."""
    return _threads(engine, _round_robin(_computing(nodes), count), nodes)


def _computing(nodes: Sequence[NodeResources]) -> list[NodeResources]:
    return [node for node in nodes if node.cpus >= 1] or list(nodes)


def _round_robin(nodes: Sequence[NodeResources], count: int) -> list[NodeResources]:
    return [nodes[i % len(nodes)] for i in range(count)]


def _threads(engine: EngineConfig, homes: Sequence[NodeResources], nodes: Sequence[NodeResources]) -> int:
    """Threads of each engine when the engines at `homes` share their nodes' cores.

    Said in so many words, since Ray tells a worker of less than one CPU to use one thread.
    """
    if engine.threads is not None:
        return engine.threads
    crowd = max(Counter(home.node for home in homes).values(), default=1)
    return max(1, int(min((home.cpus for home in homes or nodes), default=1)) // crowd)


def _on_cpu(home: NodeResources) -> dict[str, Any]:
    """Options of an actor that computes on a node's cores."""
    # To its node by name: to Ray an actor that asks for no CPU may as well go to a node that has none, or beside
    # another one. Soft, so that it starts again elsewhere when its node is lost.
    where = NodeAffinitySchedulingStrategy(home.node, soft=True)
    # No logical CPUs: engines that held them all would leave none for reading and writing, and the job would hang.
    # A byte of memory, since Ray (2.60) sends an actor that asks for nothing anywhere, whatever node is named.
    return {"num_gpus": 0, "num_cpus": 0, "memory": 1, "scheduling_strategy": where}


def _place_groups(engine: EngineConfig, groups: Sequence[GroupConfig], nodes: Sequence[NodeResources]) -> PoolPlan:
    free = {node.node: {"CPU": node.cpus, "GPU": node.gpus, **node.custom} for node in nodes}
    plans: list[ActorPlan] = []
    warnings: list[str] = []
    wanted_cpus = 0.0
    spare = max(0.0, sum(node.cpus for node in nodes) - SPARE_CPUS)
    for group in groups:
        settings = engine.replace(**group.engine)
        if settings.target != engine.target:
            # Rows are made for one target's tokenizer and template, and any engine may answer them.
            problem = f"is another target than the job's, {engine.target!r}"
            remedy = "Give all engines one target, or run a job for each"
            raise ConfigError(describe(f"pool.groups.{group.name}.engine.target", settings.target, problem, remedy))
        demand = _demand(group, settings, nodes)
        homes = _seats(group, demand, free, nodes)
        count, needed = _count(group, demand, homes)
        if demand.get("CPU"):
            count = _within_cpus(group, count, needed, spare - wanted_cpus, warnings)
            wanted_cpus += count * demand["CPU"]
        plans += _plans(group, settings, demand, homes[:count], count, needed, nodes)
    return PoolPlan(plans, warnings)


def _demand(group: GroupConfig, engine: EngineConfig, nodes: Sequence[NodeResources]) -> dict[str, float]:
    """What one actor of the group asks Ray for, by resource."""
    demand: dict[str, float] = {name: float(amount) for name, amount in group.resources.items()}
    if group.accelerator_type is not None:
        known = {value for name, value in vars(_accelerators).items() if name.isupper()}
        there = {name.removeprefix(_ACCELERATOR) for node in nodes for name in node.custom if _ACCELERATOR in name}
        if group.accelerator_type not in known | there:
            raise ConfigError(
                describe(
                    f"pool.groups.{group.name}.accelerator_type",
                    group.accelerator_type,
                    "is no accelerator that Ray or this cluster knows",
                    f"Here: {', '.join(sorted(there)) or 'none'}. Ray's names: {', '.join(sorted(known))}",
                )
            )
        # Ray's own amount for "on a node of this type".
        demand[_ACCELERATOR + group.accelerator_type] = 0.001
    gpus = group.num_gpus
    if gpus is None:
        matching = [node for node in nodes if all(node.custom.get(name, 0) > 0 for name in demand)]
        on_gpu = group.accelerator_type is not None or any(node.gpus for node in matching)
        gpus = 0.0 if engine.device == "cpu" else float(on_gpu or engine.device.startswith("cuda"))
    if gpus == 0 and engine.device.startswith("cuda"):
        problem = f"computes on {engine.device}"
        raise ConfigError(describe(f"pool.groups.{group.name}.num_gpus", 0, problem, "Ask for 1, or set device: cpu"))
    return {**demand, **({"GPU": gpus} if gpus else {}), **({"CPU": group.num_cpus} if group.num_cpus else {})}


def _seats(
    group: GroupConfig, demand: dict[str, float], free: dict[str, dict[str, float]], nodes: Sequence[NodeResources]
) -> list[NodeResources]:
    """A node for each actor of the group that has room now, spread over the nodes; what they take is taken from
    `free`. A group that asks for nothing countable has one seat a node, or as many as it wants."""
    limit = group.count or group.max
    if not demand:
        return _round_robin(_computing(nodes), limit or len(_computing(nodes)))
    seats: list[NodeResources] = []
    found = True
    while found and (limit is None or len(seats) < limit):
        found = False
        for node in nodes:
            if limit is not None and len(seats) == limit:
                break
            left = free[node.node]
            if all(left.get(name, 0.0) >= amount - 1e-9 for name, amount in demand.items()):
                for name, amount in demand.items():
                    left[name] -= amount
                seats.append(node)
                found = True
    return seats


def _count(group: GroupConfig, demand: dict[str, float], homes: Sequence[NodeResources]) -> tuple[int, int]:
    """(actors to create, actors that must be ready before the job begins)."""
    field_name = f"pool.groups.{group.name}.count"
    needs = ", ".join(f"{name}: {amount:g}" for name, amount in demand.items())
    if group.max is not None:
        # Those without room wait inside Ray, which is how an autoscaler learns of them.
        return group.max, group.min or 0
    if group.count is not None and len(homes) < group.count:
        problem = f"needs {{{needs}}} each, and the cluster has room for {len(homes)}"
        raise ConfigError(describe(field_name, group.count, problem, "Lower it, or name min and max to wait for nodes"))
    if not homes:
        problem = f"is left open, and no node has {{{needs}}}"
        raise ConfigError(
            describe(field_name, None, problem, "Mend the resources, or name min and max to wait for nodes")
        )
    return len(homes), 0


def _within_cpus(group: GroupConfig, count: int, needed: int, spare: float, warnings: list[str]) -> int:
    """The count, or less of it, so that reading and writing keep their CPUs."""
    fit = max(0, math.floor(spare / group.num_cpus + 1e-9))
    if count <= fit:
        return count
    why = f"{count} actors of {group.num_cpus:g} CPUs would leave fewer than {SPARE_CPUS} CPUs for reading and writing"
    if fit < max(1, needed):
        remedy = "Lower num_cpus (0 is fine: engines then share the cores), or add nodes"
        raise ConfigError(describe(f"pool.groups.{group.name}.num_cpus", group.num_cpus, why, remedy))
    warnings.append(f"group {group.name}: {why}; {fit} are started")
    return fit


def _plans(
    group: GroupConfig,
    engine: EngineConfig,
    demand: dict[str, float],
    homes: Sequence[NodeResources],
    count: int,
    needed: int,
    nodes: Sequence[NodeResources],
) -> list[ActorPlan]:
    plain: dict[str, Any] = {"num_cpus": group.num_cpus, "num_gpus": demand.get("GPU", 0.0)}
    if group.resources:
        plain["resources"] = dict(group.resources)
    if group.accelerator_type is not None:
        plain["accelerator_type"] = group.accelerator_type
    changes: dict[str, Any] = {"device": "cuda" if demand.get("GPU") else "cpu"}
    if not demand.get("GPU"):
        threads = int(group.num_cpus) if group.num_cpus >= 1 and engine.threads is None else None
        changes["threads"] = threads or _threads(engine, homes, nodes)
    plans = []
    for i in range(count):
        options = dict(plain)
        # Only where nothing else says which node: Ray's own choice by resources spreads over what is really free.
        if not demand and homes:
            options = _on_cpu(homes[i % len(homes)])
        optional = group.max is not None and i >= needed
        settings = engine.replace(**changes)
        plans.append(ActorPlan(f"{group.name}-{i}", settings, options, group.name, i < needed, optional))
    return plans
