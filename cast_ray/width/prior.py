"""What a drafter's folder says of its masses: acceptance measured on held-out prompts, by temperature, depth and mass.

An engine's first rounds lean on it (`width.reliability`), and the watch over the drafter holds acceptance against it
(`engine.health`). Here it is read and written as plain values; who measures it is `stats.drafter_record`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cast_ray.errors import DrafterError, describe
from cast_ray.width.curve import Array
from cast_ray.width.reliability import DEPTHS, MASSES, WARMTHS

# Decimals of the sums that are written.
DECIMALS = 5
# Expected acceptances that a wider class is worth against a class's own.
LEAN = 6.0
MEASURE = "Measure it anew with `cast-ray check-drafter --record`"


@dataclass(frozen=True)
class AcceptanceRecord:
    """Sums a request-round of trees of `nodes` nodes, by class of temperature (see `reliability.WARMTHS`).

    promised, accepted: {class: [DEPTHS, MASSES]} of the masses verified, and of the nodes accepted.
    rounds: {class: request-rounds that they rest on}.
    """

    nodes: int
    rounds: dict[int, int]
    promised: dict[int, Array]
    accepted: dict[int, Array]

    @classmethod
    def of_counts(cls, nodes: int, rounds: dict[int, int], promised: Array, accepted: Array) -> AcceptanceRecord:
        """From sums over all rounds, [classes, DEPTHS, MASSES] each; classes without rounds are left out."""
        seen = {warmth: count for warmth, count in rounds.items() if count}
        return cls(
            nodes,
            seen,
            {warmth: promised[warmth] / count for warmth, count in seen.items()},
            {warmth: accepted[warmth] / count for warmth, count in seen.items()},
        )

    def ratios(self) -> Array:
        """[DEPTHS, MASSES], accepted over promised of greedy rounds; a class that saw little leans on its depth, and
        that on all together. Of a record without greedy rounds, those of its coldest class."""
        coldest = min(self.rounds)
        promised, accepted = (sums[coldest] * self.rounds[coldest] for sums in (self.promised, self.accepted))
        overall = (accepted.sum() + LEAN) / (promised.sum() + LEAN)
        by_depth = (accepted.sum(axis=1) + LEAN * overall) / (promised.sum(axis=1) + LEAN)
        ratios: Array = (accepted + LEAN * by_depth[:, None]) / (promised + LEAN)
        return ratios

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Sums by depth, and by depth and class of mass: half octaves from 1 down."""
        return {
            "nodes": self.nodes,
            "by_temperature": [
                {
                    "temperature_up_to": float(WARMTHS[warmth]) if warmth < len(WARMTHS) else None,
                    "rounds": self.rounds[warmth],
                    "by_depth": [
                        {
                            "depth": depth + 1,
                            "promised": round(float(self.promised[warmth][depth].sum()), DECIMALS),
                            "accepted": round(float(self.accepted[warmth][depth].sum()), DECIMALS),
                            "promised_by_mass": _rounded(self.promised[warmth][depth]),
                            "accepted_by_mass": _rounded(self.accepted[warmth][depth]),
                        }
                        for depth in range(DEPTHS)
                        if self.promised[warmth][depth].any()
                    ],
                }
                for warmth in sorted(self.rounds)
            ],
        }

    @classmethod
    def from_dict(cls, values: object) -> AcceptanceRecord:
        """Read what `to_dict` wrote; DrafterError naming the field that is missing or damaged."""
        nodes = _number(_entry(values, "nodes"), "nodes", 1)
        rounds: dict[int, int] = {}
        promised, accepted = {}, {}
        for part in _listed(values, "by_temperature"):
            bound = _entry(part, "temperature_up_to")
            warmth = len(WARMTHS) if bound is None else int(np.searchsorted(WARMTHS, _number(bound, "temperature", 0)))
            sums = np.zeros((2, DEPTHS, MASSES))
            for row in _listed(part, "by_depth"):
                depth = int(_number(_entry(row, "depth"), "depth", 1))
                if depth > DEPTHS:
                    raise _bad("depth", depth, f"is beyond the {DEPTHS} depths that are told apart")
                for side, name in enumerate(("promised_by_mass", "accepted_by_mass")):
                    numbers = [_number(value, name, 0) for value in _listed(row, name)]
                    if len(numbers) > MASSES:
                        raise _bad(name, len(numbers), f"are more than the {MASSES} classes of mass")
                    sums[side, depth - 1, : len(numbers)] = numbers
            rounds[warmth] = int(_number(_entry(part, "rounds"), "rounds", 1))
            promised[warmth], accepted[warmth] = sums
        if not rounds:
            raise _bad("by_temperature", [], "holds nothing that was measured")
        return cls(int(nodes), rounds, promised, accepted)


def _rounded(sums: Array) -> list[float]:
    """Up to the last class that holds something."""
    last = int(np.flatnonzero(sums)[-1]) + 1 if sums.any() else 0
    return [round(float(value), DECIMALS) for value in sums[:last]]


def _entry(values: object, name: str) -> Any:
    if not isinstance(values, dict) or name not in values:
        raise _bad(name, None, "is missing")
    return values[name]


def _listed(values: object, name: str) -> list[Any]:
    found = _entry(values, name)
    if not isinstance(found, list):
        raise _bad(name, found, "is no list")
    return found


def _number(value: object, name: str, least: float) -> float:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not math.isfinite(value) or value < least:  # type: ignore[arg-type, operator]
        raise _bad(name, value, f"is no number of at least {least:g}")
    return float(value)  # type: ignore[arg-type]


def _bad(name: str, value: object, problem: str) -> DrafterError:
    return DrafterError(describe(f"reliability.{name}", value, problem, MEASURE))
