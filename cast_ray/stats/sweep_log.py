"""The runs of an unfinished sweep on disk: one line a run, so that a sweep that was stopped goes on where it was.

The first line says what is being measured; a sweep of other settings does not go on from it. Nothing is measured here.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cast_ray.errors import ConfigError, describe
from cast_ray.stats.rounds import Run

NAME = "progress.jsonl"
# Place of a run: repeat, group of prompts, method.
Place = tuple[int, int, str]


class SweepLog:
    """See the module. folder: of the sweep's output. about: its settings, as plain values."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.path = folder / NAME
        self._about = json.loads(json.dumps(about))
        self.prediction: dict[str, Any] | None = None
        self.runs: dict[Place, Run] = {}
        if self.path.exists():
            self._read()

    def begin(self, prediction: dict[str, Any]) -> None:
        """Start the file. prediction: what was predicted before the first run, which later pieces keep."""
        self.prediction = prediction
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"about": self._about, "prediction": prediction}) + "\n", encoding="utf-8")

    def add(self, place: Place, run: Run) -> None:
        """Write one finished run down."""
        self.runs[place] = run
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"place": place, "run": asdict(run)}) + "\n")

    def finish(self) -> None:
        """All is measured: the next sweep into this folder begins anew."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
            first, *lines = text[: text.rfind("\n") + 1].splitlines()
            head = json.loads(first)
            about, self.prediction = head["about"], head["prediction"]
        except (ValueError, KeyError, TypeError):
            problem = "is no log of an unfinished sweep"
            raise ConfigError(describe("output", str(self.path), problem, "Remove it")) from None
        here = self._about
        if other := sorted(name for name in here.keys() | about.keys() if here.get(name) != about.get(name)):
            problem = f"is of an unfinished sweep with another {', '.join(other)}"
            remedy = "Repeat its command to go on, give another folder, or remove the file"
            raise ConfigError(describe("output", str(self.path), problem, remedy))
        for line in lines:
            entry = json.loads(line)
            again, group, method = entry["place"]
            self.runs[again, group, method] = Run(**entry["run"])
        if not text.endswith("\n"):  # killed while it wrote
            self.path.write_text("".join(f"{line}\n" for line in (first, *lines)), encoding="utf-8")
