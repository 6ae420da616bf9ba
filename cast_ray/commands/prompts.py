"""Prompts for the commands that try a pair out: from a JSONL file, or the samples that come with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cast_ray.training.prompts import TrainingPrompt

SAMPLES = Path(str(importlib.resources.files("cast_ray"))) / "data" / "sample_prompts.jsonl"


def load_prompts(path: Path | None, count: int) -> list[TrainingPrompt]:
    """The first `count` prompts of each domain of a JSONL file with `messages` or `prompt`, and maybe `domain`.

    Raises InputError naming the file or the line.
    """
    from cast_ray.training.prompts import read_prompts

    taken: dict[str, list[TrainingPrompt]] = {}
    for item in read_prompts(path or SAMPLES):
        taken.setdefault(item.domain, []).append(item)
    return [item for part in taken.values() for item in part[:count]]
