"""Sizes that captured forwards come in. A forward of any other size is padded up to the next: cost is a step function.

Arithmetic alone, shared by those who capture (`models.graphs`), measure (`calibration.probe`) and predict
(`width.latency`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cast_ray.errors import ConfigError, describe
from cast_ray.width.curve import Array

# Close together where a forward's time is that of reading the weights, whose rows are nearly free, up to tiles of
# matrix kernels; from some hundred rows on rows cost time, and steps are a quarter of the size or less.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Buckets:
    """tokens: packed tokens of a forward; batches: requests in it. Both ascending, at least one each."""

    tokens: tuple[int, ...]
    batches: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, sizes in (("tokens", self.tokens), ("batches", self.batches)):
            if not sizes or sizes[0] < 1 or any(low >= high for low, high in itertools.pairwise(sizes)):
                remedy = "Give at least one, ascending, each 1 or more"
                raise ConfigError(describe(f"buckets.{name}", list(sizes), "are no sizes of buckets", remedy))

    @classmethod
    def up_to(cls, tokens: int, batch: int) -> Buckets:
        """For forwards of at most `tokens` packed tokens and `batch` requests; above 1024 tokens there is no bucket."""
        # One request more than there can be: a padded forward has a segment of padding.
        return cls(_up_to(TOKENS, min(tokens, TOKENS[-1])), _up_to(BATCHES, min(batch + 1, BATCHES[-1])))

    def find(self, tokens: int, batch: int) -> tuple[int, int] | None:
        """(tokens, requests) of the bucket for a forward; None where none is large enough.

        Padding rows are a segment's or more: there are more requests than `batch` wherever there are more tokens.
        """
        place = bisect_left(self.tokens, tokens)
        if place == len(self.tokens):
            return None
        padded = self.tokens[place]
        seat = bisect_left(self.batches, batch + (padded > tokens))
        return None if seat == len(self.batches) else (padded, self.batches[seat])

    def padded(self, tokens: Array) -> Array:
        """The tokens that a forward of so many really computes, same shape: beyond the last bucket its own."""
        edges = np.asarray(self.tokens, dtype=np.float64)
        place = np.searchsorted(edges, tokens)
        return np.where(place < len(edges), edges[np.minimum(place, len(edges) - 1)], tokens)

    def to_list(self) -> list[list[int]]:
        """Plain JSON values, for `from_list`."""
        return [list(self.tokens), list(self.batches)]

    @classmethod
    def from_list(cls, values: object) -> Buckets:
        """Read what `to_list` wrote; ConfigError where it is damaged."""
        try:
            pair: Any = values
            of_tokens, of_batches = pair
            return cls(tuple(int(n) for n in of_tokens), tuple(int(n) for n in of_batches))
        except (TypeError, ValueError):
            remedy = "Remove the profile, and the next start measures this device again"
            raise ConfigError(describe("buckets", values, "are no two lists of sizes", remedy)) from None


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(sizes[: bisect_left(sizes, most) + 1])
