"""What a training run is at a moment, and its two saves: the last one, and the last one at full learning rate.

A run whose learning rate has fallen is finished, not spoilt: a longer one goes on from before the fall.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cast_ray.errors import ConfigError, describe
from cast_ray.training.files import write_whole

LAST = "last.pt"
BEFORE_DECAY = "before_decay.pt"


@dataclass
class TrainingState:
    """network: in float32; scale: `[taps * hidden]`, what features are divided by before `fc`.

    step: optimiser steps done; seconds: wall time they took; decaying: whether the learning rate has begun to fall.
    history: one (step, loss, top-1 accuracy at depth 1, expected round length) for every few steps.
    """

    network: Any
    optimisers: list[torch.optim.Optimizer]
    scale: Tensor
    shape: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    decaying: bool = False
    history: list[tuple[int, float, float, float]] = field(default_factory=list)

    def save(self, folder: Path, name: str = LAST) -> None:
        """Whole or not at all; the file before stays until then."""
        value = {
            "network": self.network.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "scale": self.scale,
            "shape": self.shape,
            "step": self.step,
            "seconds": self.seconds,
            "decaying": self.decaying,
            "history": self.history,
        }
        write_whole(folder / name, lambda part: torch.save(value, part))

    def load(self, folder: Path, name: str = LAST) -> bool:
        """Go on from a save; False where there is none. ConfigError where it is of another network."""
        path = folder / name
        if not path.exists():
            return False
        value = torch.load(path, map_location=self.scale.device, weights_only=True)
        if value["shape"] != self.shape:
            problem = f"holds a network of another shape ({_difference(value['shape'], self.shape)})"
            raise ConfigError(describe("work", str(folder), problem, "Use the same settings, or another --work"))
        self.network.load_state_dict(value["network"])
        for optimiser, saved in zip(self.optimisers, value["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.scale = value["scale"]
        self.step, self.seconds, self.decaying = value["step"], value["seconds"], value["decaying"]
        self.history = [tuple(entry) for entry in value["history"]]
        return True


def _difference(saved: dict[str, Any], asked: dict[str, Any]) -> str:
    names = [name for name in asked if saved.get(name) != asked[name]]
    return ", ".join(f"{name} {saved.get(name)!r} there, {asked[name]!r} asked for" for name in names)


def rate_factor(step: int, warmup: int, progress: float, decay_share: float) -> float:
    """Share of the full learning rate: a linear start over `warmup` steps, level, linear to zero over the last
    `decay_share` of the run (progress 0..1)."""
    start = min(1.0, (step + 1) / max(1, warmup))
    left = 1.0 - progress
    return start * (min(1.0, left / decay_share) if decay_share > 0 else 1.0)
