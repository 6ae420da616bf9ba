"""The course of a job: a look at rows and engines every now and then, thinned so that a long job keeps few of them.

Pure: whoever looks passes in what was seen. An engine that starts again counts from zero; the timeline does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_SAMPLES = 480
# Running totals that are followed, as `Engine.stats()` names them.
_TOTALS = ("tokens_committed", "rounds", "nodes_verified")


@dataclass(frozen=True)
class Sample:
    """One look. seconds: since the start. rows: done so far. actors: running totals by name, deaths bridged."""

    seconds: float
    rows: int
    actors: dict[str, dict[str, float]]

    def total(self, key: str) -> float:
        return sum(actor[key] for actor in self.actors.values())


@dataclass
class Timeline:
    """Samples at growing distances: where there are too many, every other one goes and new ones come half as often."""

    samples: list[Sample] = field(default_factory=list)
    _every: int = 1
    _looks: int = 0
    _last: dict[str, dict[str, float]] = field(default_factory=dict)
    _before: dict[str, dict[str, float]] = field(default_factory=dict)
    newest: Sample | None = None

    def add(self, seconds: float, rows: int, stats: Mapping[str, Mapping[str, Any]]) -> Sample:
        """Take in `EnginePool.stats()`. Actors that were silent keep what they had."""
        for name, about in stats.items():
            engine = about.get("engine")
            if engine is None:
                continue
            seen = {
                "tokens_committed": engine["rounds"] * engine["mean_round_length"],
                "rounds": float(engine["rounds"]),
                "nodes_verified": float(engine["nodes_verified"]),
            }
            last = self._last.get(name)
            if last is not None and seen["rounds"] < last["rounds"]:
                base = self._before.setdefault(name, dict.fromkeys(_TOTALS, 0.0))
                for key in _TOTALS:
                    base[key] += last[key]
            self._last[name] = seen
        actors = {
            name: {key: seen[key] + self._before.get(name, {}).get(key, 0.0) for key in _TOTALS}
            for name, seen in self._last.items()
        }
        sample = Sample(seconds, rows, actors)
        self.newest = sample
        if self._looks % self._every == 0:
            self.samples.append(sample)
            if len(self.samples) > _MOST_SAMPLES:
                del self.samples[1::2]
                self._every *= 2
        self._looks += 1
        return sample

    def since(self, seconds: float) -> tuple[Sample, Sample] | None:
        """(a sample at least that much older than the newest, or the first; the newest); None before two looks."""
        if self.newest is None or not self.samples or self.samples[0] is self.newest:
            return None
        old = [sample for sample in self.samples if sample.seconds <= self.newest.seconds - seconds]
        return (old[-1] if old else self.samples[0]), self.newest

    def to_dict(self) -> dict[str, Any]:
        """Series for the report. seconds: the end of each span; rates and means are of the span before it."""
        samples = [*self.samples]
        if self.newest is not None and samples and samples[-1] is not self.newest:
            samples.append(self.newest)
        pairs = [(old, new) for old, new in itertools.pairwise(samples) if new.seconds > old.seconds]
        names = list(samples[-1].actors) if samples else []
        return {
            "seconds": [round(new.seconds, 2) for _, new in pairs],
            "rows": [new.rows for _, new in pairs],
            "tokens_per_s": [_rate(old, new, None, "tokens_committed") for old, new in pairs],
            "round_length": [_mean(old, new, None, "tokens_committed") for old, new in pairs],
            "width": {name: [_mean(old, new, name, "nodes_verified") for old, new in pairs] for name in names},
            "actor_tokens_per_s": {
                name: [_rate(old, new, name, "tokens_committed") for old, new in pairs] for name in names
            },
        }


def grown(old: Sample, new: Sample, name: str | None, key: str) -> float:
    """What one actor's total grew by between two looks, or all of them for None."""
    names = new.actors if name is None else ([name] if name in new.actors else [])
    return sum(new.actors[one][key] - old.actors.get(one, {}).get(key, 0.0) for one in names)


def _rate(old: Sample, new: Sample, name: str | None, key: str) -> float:
    return round(grown(old, new, name, key) / (new.seconds - old.seconds), 2)


def _mean(old: Sample, new: Sample, name: str | None, key: str) -> float | None:
    """A mean over the rounds of the span; None where there were none."""
    rounds = grown(old, new, name, "rounds")
    return round(grown(old, new, name, key) / rounds, 3) if rounds > 0 else None
