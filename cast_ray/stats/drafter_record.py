"""Measures what a drafter's folder is to say of its masses, and writes it there: acceptance on held-out prompts.

Prompts that the drafter was trained on would promise too much. What the record is used for is `width.prior`'s.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cast_ray.config import EngineConfig
from cast_ray.drafters.checkpoint import find_drafter
from cast_ray.drafters.pair import ACCEPTANCE, RECORD
from cast_ray.engine.engine import Engine
from cast_ray.errors import ConfigError, DrafterError, describe
from cast_ray.request import Prompt, SamplingParams, derive_seed
from cast_ray.stats.acceptance import drafter_of, target_of
from cast_ray.stats.pair_check import named_drafter
from cast_ray.stats.signature import SIGNATURE, Signature, read_signature
from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.fixed import FixedWidth
from cast_ray.width.host import accepted_nodes, read_tree
from cast_ray.width.prior import AcceptanceRecord
from cast_ray.width.reliability import DEPTHS, MASSES, WARMTHS, class_of_mass

# Nodes a request that are verified while measuring; wide, so that light candidates are met as well.
NODES = 63
TEMPERATURES = (0.0, 1.0)
NUMBERS = re.compile(r"\[\s+([-+.\deE,\s]+?)\s+\]")
Report = Callable[[str, int, int], None]


def measure_acceptance(
    engine: Engine,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperatures: Sequence[float] = TEMPERATURES,
    report: Report = lambda name, done, total: None,
) -> AcceptanceRecord:
    """Decode the prompts at a wide tree, once for each temperature, and count what was promised and accepted.

    Of a target that takes no trees it is the chain that is verified. Raises ConfigError where there is no drafter.
    """
    drafter = drafter_of(engine)
    if drafter is None:
        raise ConfigError(describe("drafter", engine.config.drafter, "names no drafter to measure", "Give one"))
    branching = target_of(engine).states is None
    most = NODES if branching else drafter.block_size - 1
    before, counting = engine.policy, _Counting(min(most, engine.config.max_nodes), branching)
    engine.use_policy(counting)
    try:
        for number, temperature in enumerate(temperatures):
            report(f"acceptance at temperature {temperature:g}", number, len(temperatures))
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=derive_seed(0, "record", place))
                for place in range(len(prompts))
            ]
            engine.generate(prompts, params)
    finally:
        engine.use_policy(before, health=engine.health)
    rounds = {warmth: int(count) for warmth, count in enumerate(counting.rounds)}
    if not any(rounds.values()):
        problem = "gave no round in which the drafter ran"
        raise ConfigError(describe("prompts", len(prompts), problem, "Give more, or raise max_tokens"))
    return AcceptanceRecord.of_counts(counting.max_nodes, rounds, *counting.sums)


def record_acceptance(
    config: EngineConfig, prompts: Sequence[Prompt], max_tokens: int, report: Report = lambda name, done, total: None
) -> tuple[Path, AcceptanceRecord]:
    """Measure the pair of these settings and write the record into the drafter's `config.json`.

    The rest of the record, if there is one, stays as the trainer wrote it. Returns the file, and what was written.
    Raises DrafterError where the file cannot be written.
    """
    path = find_drafter(named_drafter(config)) / "config.json"
    engine = Engine(config.replace(drafter=named_drafter(config), width="chain", prefix_cache=False))
    record = measure_acceptance(engine, prompts, max_tokens, report=report)
    write_record(path, record, read_signature(engine, engine.render(prompts[0])))
    return path, record


def write_record(path: Path, record: AcceptanceRecord, signature: Signature) -> None:
    """Put both into the record of a drafter's `config.json`, in one step."""
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    pair = raw.get(RECORD)
    kept = pair if isinstance(pair, dict) else {}
    raw[RECORD] = {**kept, ACCEPTANCE: record.to_dict(), SIGNATURE: signature.to_dict()}
    # A list of numbers on one line: hundreds of lines of digits would bury the rest.
    text = NUMBERS.sub(lambda found: f"[{', '.join(found[1].split())}]".replace(",,", ","), json.dumps(raw, indent=2))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise DrafterError(describe("drafter", str(path), problem, "Copy the folder, and give the copy")) from None
    finally:
        part.unlink(missing_ok=True)


class _Counting(FixedWidth):
    """Always the same wide tree; counts masses and acceptance of what it verifies, by class."""

    def __init__(self, nodes: int, branching: bool) -> None:
        super().__init__(f"fixed:{nodes}" if branching else "chain", nodes, branching)
        classes = len(WARMTHS) + 1
        self.rounds = np.zeros(classes)
        self.sums = np.zeros((2, classes, DEPTHS, MASSES))  # promised, accepted

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        read = read_tree(tree, temperatures)
        batch, nodes = read.masses.shape
        verified = np.arange(nodes) < np.minimum(widths.cpu().numpy(), read.counts)[:, None]
        on_path = accepted_nodes(accepted, nodes)
        warmth = np.zeros(batch, dtype=np.int64) if read.warmth is None else np.searchsorted(WARMTHS, read.warmth)
        depth = np.clip(read.depths - 1, 0, DEPTHS - 1)
        places = (np.broadcast_to(warmth[:, None], depth.shape), depth, class_of_mass(read.masses))
        chosen = tuple(place[verified] for place in places)
        np.add.at(self.sums[0], chosen, read.masses[verified])
        np.add.at(self.sums[1], chosen, on_path[verified])
        self.rounds += np.bincount(warmth[verified.any(axis=1)], minlength=len(self.rounds))
