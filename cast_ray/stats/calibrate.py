"""What `cast-ray calibrate` shows: this device's table, and the widths that a pair's own acceptance makes of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from cast_ray.calibration.measure import DeviceProfile
from cast_ray.config import EngineConfig
from cast_ray.engine.engine import Engine
from cast_ray.request import Prompt, SamplingParams
from cast_ray.stats.acceptance import drafter_of, target_of
from cast_ray.stats.rounds import decode
from cast_ray.stats.surface import batches_of
from cast_ray.width.deployment import DeploymentWidth
from cast_ray.width.latency import LatencyTable


def calibrated(config: EngineConfig, *, again: bool) -> tuple[Engine, Path, LatencyTable]:
    """An engine of these settings, and its device's profile and table; again: measured even where it is saved.

    What an earlier probe had no time for is measured now, for up to `probe_seconds` beside those of the start.
    """
    began = time.time()
    engine = Engine(config.replace(width="deployment"))
    profile = DeviceProfile(config, target_of(engine), drafter_of(engine), engine.max_context)
    latency = engine.stats()["latency"]
    fresh = bool(latency) and profile.path.exists() and profile.path.stat().st_mtime >= began
    # What its start has just measured is not measured again.
    return engine, profile.path, profile.table(again=again and not fresh, patient=True)


def chosen_widths(engine: Engine, table: LatencyTable, prompts: Sequence[Prompt], tokens: int) -> dict[int, int]:
    """N* of the `deployment` rule at every measured batch, after its calibration rounds; nothing without trees."""
    if drafter_of(engine) is None or target_of(engine).states is not None:
        return {}
    rule = DeploymentWidth(engine.config.max_nodes, table)
    batch = min(engine.config.max_batch_size, 4)
    for start in range(0, len(prompts), batch):
        decode(engine, rule, prompts[start : start + batch], SamplingParams(max_tokens=tokens))
        if rule.report()["calibrated"]:
            break
    return {size: rule.width(size, table.base_context) for size in batches_of(table)}
