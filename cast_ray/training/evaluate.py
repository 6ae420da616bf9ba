"""Step 4: the finished drafter on prompts that it never saw, through the real engine. `reliability` has its masses."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from cast_ray.config import EngineConfig
from cast_ray.engine.engine import Engine
from cast_ray.request import Completion, SamplingParams
from cast_ray.stats.drafter_record import record_acceptance
from cast_ray.training.answers import Report
from cast_ray.training.config import TrainConfig
from cast_ray.training.shards import Answer

WIDTHS = (7, 15, 31, 63)
EVALUATION_TOKENS = 64
BATCH = 8


def evaluate(config: TrainConfig, held_out: list[Answer], drafter: Path, report: Report) -> dict[str, Any]:
    """Mean round length, all tokens over all rounds, by domain and width, greedy.

    The same prompts' acceptance by depth and mass goes into the drafter's `config.json`, for engines to start from.

    drafter: its exported folder. Returns plain values: widths, prompts, max_tokens and round_length.
    """
    widths = ["chain", *(f"fixed:{nodes}" for nodes in WIDTHS)]
    lengths: dict[str, dict[str, float]] = defaultdict(dict)
    for number, width in enumerate(widths):
        engine = Engine(_engine_config(config, drafter, width))
        completions = engine.generate(
            [list(item.prompt_ids) for item in held_out], SamplingParams(max_tokens=EVALUATION_TOKENS)
        )
        for domain, group in _by_domain(held_out, completions).items():
            lengths[domain][width] = _round_length(group)
        report("evaluation", number + 1, len(widths))
    unseen = [list(item.prompt_ids) for item in held_out]
    record_acceptance(_engine_config(config, drafter, "chain"), unseen, EVALUATION_TOKENS, report)
    return {
        "widths": widths,
        "prompts": len(held_out),
        "max_tokens": EVALUATION_TOKENS,
        "round_length": dict(lengths),
    }


def record(config: TrainConfig, held_out: list[Answer], drafter: Path, report: Report) -> None:
    """Measure what is accepted of the drafter's masses, greedy and sampled, and keep it in the folder's config.json.

    Engines start from it in place of believing the masses.
    """
    prompts = [list(item.prompt_ids) for item in held_out]
    record_acceptance(_engine_config(config, drafter, "chain"), prompts, EVALUATION_TOKENS, report)


def _engine_config(config: TrainConfig, drafter: Path, width: str) -> EngineConfig:
    return EngineConfig(
        target=config.target,
        drafter=str(drafter),
        width=width,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_batch_size=BATCH,
    )


def _by_domain(prompts: list[Answer], completions: list[Completion]) -> dict[str, list[Completion]]:
    groups: dict[str, list[Completion]] = {"all": completions}
    for item, completion in zip(prompts, completions, strict=True):
        groups.setdefault(item.domain, []).append(completion)
    return groups


def _round_length(completions: list[Completion]) -> float:
    rounds = sum(completion.stats.rounds for completion in completions)
    return sum(completion.stats.tokens_committed for completion in completions) / rounds if rounds else 0.0
