"""What an actor counts of its rows besides what its engine counts of its rounds. Plain numbers, no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Width of a bin of the histogram of rows by mean round length, in tokens.
LENGTH_BIN = 0.5


@dataclass
class RowCounters:
    """Rows of one actor: answered, by kind of error, and by mean round length.

    round_lengths: rows by the lower end of their bin of `LENGTH_BIN` tokens a round.
    """

    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    round_lengths: Counter[float] = field(default_factory=Counter)

    def answer(self, tokens: int, rounds: int, seconds: float) -> None:
        self.answered += 1
        self.seconds += seconds
        if rounds:
            self.round_lengths[tokens / rounds // LENGTH_BIN * LENGTH_BIN] += 1

    def fail(self, kind: str) -> None:
        self.errors[kind] += 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `mean_seconds` is a row's time at the actor."""
        return {
            "answered": self.answered,
            "errors": dict(self.errors),
            "mean_seconds": self.seconds / self.answered if self.answered else None,
            "round_lengths": {f"{low:g}": count for low, count in sorted(self.round_lengths.items())},
        }


def add_up(histograms: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """One histogram of several with the same bins, in the order of the bins."""
    total: Counter[str] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items(), key=lambda item: float(item[0])))
