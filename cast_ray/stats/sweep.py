"""Every width measured on one's own prompts, beside what the rules would have chosen. The numbers are `sweep_table`'s.

Methods take turns prompt by prompt, in an order that changes with each, so that a machine that slows down slows all of
them; compared are always the same prompts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cast_ray.config import EngineConfig
from cast_ray.engine.engine import Engine
from cast_ray.errors import ConfigError, describe
from cast_ray.request import Prompt, SamplingParams
from cast_ray.stats.acceptance import drafter_of, record_of, target_of
from cast_ray.stats.rounds import Balanced, Run, decode
from cast_ray.stats.sweep_log import SweepLog
from cast_ray.width.deployment import DeploymentWidth
from cast_ray.width.latency import LatencyTable
from cast_ray.width.policy import WidthPolicy, make_policy

# The widths of the paper's sweeps, and narrower ones for small devices. 0 is plain decoding.
WIDTHS = (0, 3, 7, 11, 15, 23, 31, 47, 63, 95, 127)
BALANCED = "balanced"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """One prompt and the domain that it is counted under."""

    prompt: Prompt
    domain: str


@dataclass(frozen=True)
class Prediction:
    """What `deployment` says before any width was tried: from the probe, and the round lengths of calibration rounds.

    width: N*. settled: whether there were rounds enough. batch, context: the load that it is for.
    round_ms: predicted ms of a round at every width 0..N_max, [N_max + 1]; round_length: R(N) of the same widths.
    """

    width: int
    settled: bool
    batch: int
    context: int
    round_ms: Array
    round_length: Array

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for `from_dict`."""
        arrays = {"round_ms": self.round_ms.tolist(), "round_length": self.round_length.tolist()}
        return {"width": self.width, "settled": self.settled, "batch": self.batch, "context": self.context, **arrays}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Prediction:
        """Read what `to_dict` wrote."""
        arrays = {name: np.array(values[name], dtype=np.float64) for name in ("round_ms", "round_length")}
        return cls(**{**values, **arrays})


@dataclass(frozen=True)
class Sweep:
    """Runs of every method on every group of prompts; arrays are [groups, methods].

    methods: `ar`, `chain`, `fixed:N`, `balanced` (a tree of the chain's size without masses) and `joint`.
    """

    methods: tuple[str, ...]
    domains: tuple[str, ...]
    ms: Array
    tokens: Array
    rounds: Array
    nodes: Array
    chain_nodes: int
    prediction: Prediction

    def column(self, method: str) -> int:
        """The place of a method."""
        return self.methods.index(method)


def sweep_config(config: EngineConfig, widths: Sequence[int], batch: int) -> EngineConfig:
    """The engine that can run all of a sweep: the widest tree, the batch, and no prompt that a run finds cached."""
    # The probe measures what `joint` asks for, at the batch and the widths of this sweep.
    return config.replace(width="joint", max_nodes=max(widths), max_batch_size=batch, prefix_cache=False)


def run_sweep(
    engine: Engine,
    items: Sequence[Item],
    widths: Sequence[int],
    params: SamplingParams,
    *,
    batch: int = 1,
    repeats: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
    log: SweepLog | None = None,
    seconds: float | None = None,
) -> Sweep | None:
    """Measure. items are decoded `batch` at a time, a domain by itself; report is told of runs done and in all.

    log: where runs are written down, and what an earlier call had measured. seconds: stop after so long, between two
    runs, and return None where some are left.
    Raises ConfigError where the engine has no drafter, or a target that takes no trees.
    """
    drafter = drafter_of(engine)
    if target_of(engine).states is not None:
        problem = "has a recurrent state, which the branches of a tree cannot share: there is no width to choose"
        raise ConfigError(describe("target", engine.config.target, problem, "Sweep a target whose layers all attend"))
    if drafter is None or not engine.stats()["latency"]:
        problem = "decodes without a drafter: there is no width to choose"
        raise ConfigError(describe("drafter", engine.config.drafter, problem, "Give one"))
    latency = LatencyTable.from_dict(engine.stats()["latency"])

    def policy(spec: str) -> WidthPolicy:
        return make_policy(
            spec,
            block_size=drafter.block_size,
            max_nodes=engine.config.max_nodes,
            latency=latency,
            record=record_of(engine),
        )

    ends = None if seconds is None else time.monotonic() + seconds
    groups = group_items(items, batch)
    joint = policy("joint")
    if log is not None and log.prediction is not None:
        prediction = Prediction.from_dict(log.prediction)
    else:
        prediction = _predict(engine, groups, latency, params, batch)
        if log is not None:
            log.begin(prediction.to_dict())
    decode(engine, joint, [item.prompt for item in groups[0]], params)

    nodes = sorted({*widths, prediction.width, drafter.block_size - 1} - {0})
    methods = ("ar", "chain", *(f"fixed:{n}" for n in nodes if n <= engine.config.max_nodes), BALANCED, "joint")
    balanced = Balanced(drafter)

    def run(method: str, prompts: list[Prompt]) -> Run:
        if method == BALANCED:
            return decode(engine, policy(f"fixed:{drafter.block_size - 1}"), prompts, params, balanced)
        return decode(engine, joint if method == "joint" else policy(method), prompts, params)

    runs: list[list[list[Run]]] = [[[] for _ in methods] for _ in groups]
    done, total = 0, repeats * len(groups) * len(methods)
    for again in range(repeats):
        for number, group in enumerate(groups):
            order = list(range(len(methods)))
            random.Random(again * len(groups) + number).shuffle(order)
            for place in order:
                method = methods[place]
                known = log.runs.get((again, number, method)) if log is not None else None
                if known is None:
                    if ends is not None and time.monotonic() > ends:
                        return None
                    known = run(method, [item.prompt for item in group])
                    if log is not None:
                        log.add((again, number, method), known)
                runs[number][place].append(known)
                done += 1
                report(done, total)

    def array(value: Callable[[Run], float]) -> Array:
        return np.array([[np.median([value(run) for run in again]) for again in row] for row in runs])

    return Sweep(
        methods=methods,
        domains=tuple(group[0].domain for group in groups),
        ms=array(lambda run: run.ms),
        tokens=array(lambda run: run.tokens),
        rounds=array(lambda run: run.request_rounds),
        nodes=array(lambda run: run.nodes),
        chain_nodes=drafter.block_size - 1,
        prediction=prediction,
    )


def group_items(items: Sequence[Item], batch: int) -> list[list[Item]]:
    """Items that are decoded together: `batch` at a time, each group of one domain; the last may be smaller."""
    by_domain: dict[str, list[Item]] = {}
    for item in items:
        by_domain.setdefault(item.domain, []).append(item)
    return [part[start : start + batch] for part in by_domain.values() for start in range(0, len(part), batch)]


def _predict(
    engine: Engine, groups: list[list[Item]], latency: LatencyTable, params: SamplingParams, batch: int
) -> Prediction:
    """Calibration rounds of the `deployment` rule on the first groups, until it has settled, and what it then says."""
    rule = DeploymentWidth(engine.config.max_nodes, latency)
    lengths = [len(engine.render(item.prompt)) for group in groups for item in group]
    context = int(np.mean(lengths)) + params.max_tokens // 2
    settled = False
    for group in groups:
        decode(engine, rule, [item.prompt for item in group], params)
        settled = bool(rule.report()["calibrated"])
        if settled:
            break
    nodes = np.arange(1, engine.config.max_nodes + 1)
    plain = latency.round_ms([0], batch, context, drafting=False)
    return Prediction(
        width=rule.width(batch, context),
        settled=settled,
        batch=batch,
        context=context,
        round_ms=np.concatenate([plain, latency.round_ms(nodes, batch, context, drafting=True)]),
        round_length=rule.estimate.mean(engine.config.max_nodes),
    )
