"""What a part of the check gets: its device, its deadline, and a place for results that is saved after every one."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Part:
    """into: the file of the results. seconds: what the part may take, from now on."""

    into: Path
    seconds: float
    tiny: bool
    results: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.tiny or not torch.cuda.is_available() else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def left(self) -> float:
        """Seconds until the part should end."""
        return self.began + self.seconds - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        """Add a result and save all."""
        self.results[name] = value
        self.save()

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a row to a table and save all."""
        self.results.setdefault(name, []).append(row)
        self.save()

    def save(self) -> None:
        """Whole or not at all: whoever ends the part in the middle finds the last state."""
        aside = self.into.with_suffix(".tmp")
        aside.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
        os.replace(aside, self.into)


def wait(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
