"""What a round costs on this device: from a few measured points to predicted ms of any width, batch and context.

It measures nothing itself (`calibration.probe` does) and chooses nothing (`width.policy` does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from cast_ray.errors import ConfigError, describe
from cast_ray.width.buckets import Buckets
from cast_ray.width.curve import Array, between, pool_adjacent, smooth_within_noise

FORMAT_VERSION = 1
# Octaves of tokens within which points that differ by noise alone are averaged.
NEIGHBOURS = 0.25
REMEASURE = "Remove the profile, and the next start measures this device again"


@dataclass(frozen=True)
class LatencyPoint:
    """One measured target forward.

    tokens: packed tokens of the whole forward, all requests together, at least 1.
    batch: requests in it. context: KV tokens that each of them had cached.
    ms: median time. noise_ms: how far repeated medians of it spread; 0 takes the point at its word.
    """

    tokens: int
    batch: int
    context: int
    ms: float
    noise_ms: float = 0.0


@dataclass(frozen=True)
class DraftPoint:
    """One measured drafter forward; fields as in `LatencyPoint`."""

    batch: int
    context: int
    ms: float
    noise_ms: float = 0.0


Point = TypeVar("Point", LatencyPoint, DraftPoint)


class LatencyTable:
    """Predicted ms of a decoding round, L(N) = T_draft + T_verify + T_host in the method's notation.

    Verification is modelled as a base curve of tokens for each measured batch, at the context with most points, plus
    what other contexts were measured to cost on top. Measured points are met exactly, except that near ones are
    averaged where they differ by noise alone, and a dip within the noise of its two sides is flattened; real dips,
    steps and flat stretches stay. Between measured batches and
    contexts costs are interpolated, and clamped at the ends.

    buckets: of captured forwards. A forward that falls into one computes all of its rows, so its time is that of the
    bucket: a step function of the tokens, flat up to each bucket's end.

    Raises ConfigError when there is no verify point, or a number is out of range.
    """

    def __init__(
        self,
        verify: Sequence[LatencyPoint],
        draft: Sequence[DraftPoint] = (),
        host_ms: float = 0.0,
        buckets: Buckets | None = None,
    ) -> None:
        if not verify:
            raise ConfigError(describe("latency.verify", [], "holds no measured point", REMEASURE))
        for index, point in enumerate(verify):
            _check_point(point, f"latency.verify[{index}]")
        for index, drafted in enumerate(draft):
            _check_point(drafted, f"latency.draft[{index}]")
        self.verify = tuple(verify)
        self.draft = tuple(draft)
        self.host_ms = _number(host_ms, "latency.host_ms", 0.0)
        self.buckets = buckets

        computed = self.computed(np.array([point.tokens for point in self.verify], dtype=np.float64))
        groups = _group([replace(p, tokens=int(n)) for p, n in zip(self.verify, computed, strict=True)])
        self.base_context = max(
            groups, key=lambda context: (sum(len(g[0]) for g in groups[context].values()), -context)
        )
        base = groups.pop(self.base_context)
        self._base = {batch: (tokens, _flatten_noise(tokens, ms, noise)) for batch, (tokens, ms, noise) in base.items()}
        self._base_noise = {batch: (tokens, noise) for batch, (tokens, _, noise) in base.items()}
        self._shape = _extend_by_larger_batches(self._base)
        self._fastest = min(point.ms for point in self.verify)
        self._surcharge: dict[int, dict[int, tuple[Array, Array]]] = {self.base_context: {}}
        for context, batches in groups.items():
            self._surcharge[context] = {batch: self._added_by_context(batch, *g) for batch, g in batches.items()}
        self._draft = _group_draft(self.draft)

    def computed(self, tokens: Array) -> Array:
        """The rows that a forward over so many packed tokens computes, padding included; same shape."""
        return tokens if self.buckets is None else self.buckets.padded(tokens)

    def verify_ms(self, tokens: ArrayLike, batch: int, context: float, *, eager: bool = False) -> Array:
        """One target forward over `tokens` packed tokens (any shape) of `batch` requests. float64 ms, same shape.

        Beyond the largest measured token count the last slope goes on. Never below the fastest measured point.
        eager: one that is not captured, as those with prompt chunks are not.
        """
        packed = np.asarray(tokens, dtype=np.float64)
        if not eager:
            packed = self.computed(packed)
        added = between(self._surcharge, context, lambda measured: self._added_ms(packed, batch, measured))
        return np.maximum(self._base_ms(packed, batch) + added, self._fastest)

    def draft_ms(self, batch: int, context: float) -> float:
        """One drafter forward, ms. Raises ConfigError where no drafter was measured."""
        if not self._draft:
            raise ConfigError(describe("latency.draft", [], "holds no measured point", f"{REMEASURE} and its drafter"))
        return float(between(self._draft, batch, lambda known: np.interp([context], *self._draft[known]))[0])

    def round_ms(self, nodes: ArrayLike, batch: int, context: float, drafting: bool) -> Array:
        """A whole round in which each of `batch` requests verifies its root and `nodes` candidates. float64 ms."""
        widths = np.asarray(nodes, dtype=np.float64)
        draft = self.draft_ms(batch, context) if drafting else 0.0
        return draft + self.verify_ms(batch * (widths + 1), batch, context) + self.host_ms

    def context_price(self, contexts: Array, batch: int, nodes: int) -> Array:
        """ms a node that each context costs over the base context, with `nodes` of them. Same shape as `contexts`."""
        measured = sorted(self._surcharge)
        if len(measured) == 1:
            return np.zeros_like(contexts)
        ends = np.array([1.0, nodes + 1.0]) * batch
        added = np.array([np.diff(self._added_ms(ends, batch, known))[0] for known in measured])
        return np.interp(contexts, measured, np.maximum(added, 0.0) / (batch * nodes))

    def to_dict(self) -> dict[str, Any]:
        """The measured points as plain JSON values; `from_dict` reads them back."""
        return {
            "version": FORMAT_VERSION,
            "host_ms": self.host_ms,
            "verify": [asdict(point) for point in self.verify],
            "draft": [asdict(point) for point in self.draft],
            "buckets": None if self.buckets is None else self.buckets.to_list(),
        }

    @classmethod
    def from_dict(cls, values: object) -> LatencyTable:
        """Read what `to_dict` wrote. Raises ConfigError naming the field that is missing or damaged."""
        if not isinstance(values, dict):
            raise ConfigError(describe("latency", values, "is no mapping", REMEASURE))
        if values.get("version") != FORMAT_VERSION:
            problem = f"is no format that this version reads ({FORMAT_VERSION})"
            raise ConfigError(describe("latency.version", values.get("version"), problem, REMEASURE))
        return cls(
            verify=_read_points(LatencyPoint, values, "verify"),
            draft=_read_points(DraftPoint, values, "draft"),
            host_ms=_number(values.get("host_ms"), "latency.host_ms", 0.0),
            buckets=None if values.get("buckets") is None else Buckets.from_list(values["buckets"]),
        )

    def _base_ms(self, tokens: Array, batch: int) -> Array:
        return between(self._base, batch, lambda known: self._curve_ms(tokens, known))

    def _curve_ms(self, tokens: Array, batch: int) -> Array:
        """The base curve of one measured batch.

        Where it was measured at few counts, it rises between two of them as the common shape does: a step of the
        device's kernels stands at the same packed count whatever the batch. Outside its own range it goes on with the
        common shape as far as that was measured.
        """
        own_tokens, own_ms = self._base[batch]
        first, last = own_tokens[0], own_tokens[-1]
        ms = np.interp(tokens, own_tokens, own_ms)
        if len(own_tokens) > 1:
            left = np.clip(np.searchsorted(own_tokens, tokens, side="right") - 1, 0, len(own_tokens) - 2)
            rise = own_ms[left + 1] - own_ms[left]
            from_shape = self._shape_ms(own_tokens[left])
            shape_rise = self._shape_ms(own_tokens[left + 1]) - from_shape
            # A shape that hardly rises where this curve does says nothing about where the rise lies.
            follow = (rise > 0) & (shape_rise >= 0.25 * rise) & (tokens >= first) & (tokens <= last)
            share = np.clip((self._shape_ms(tokens) - from_shape) / np.where(follow, shape_rise, 1.0), 0.0, 1.0)
            ms = np.where(follow, own_ms[left] + rise * share, ms)
        below = own_ms[0] * np.minimum(1.0, self._shape_ms(tokens) / self._shape_ms(first))
        shape_end = self._shape[0][-1]
        above = own_ms[-1] + np.maximum(0.0, self._shape_ms(tokens) - self._shape_ms(last))
        slope = _last_slope(*(self._base[batch] if len(own_tokens) > 1 else self._shape))
        above = above + slope * np.maximum(0.0, tokens - max(last, shape_end))
        return np.where(tokens < first, below, np.where(tokens > last, above, ms))

    def _shape_ms(self, tokens: Array) -> Array:
        return np.interp(tokens, *self._shape)

    def _added_by_context(self, batch: int, tokens: Array, ms: Array, noise: Array) -> tuple[Array, Array]:
        """What a context costs over the base, per request, against tokens per request.

        Per request, because every request reads its own context: so a surcharge measured at one batch carries over.
        """
        base_noise = between(self._base_noise, batch, lambda known: np.interp(tokens, *self._base_noise[known]))
        added = _flatten_noise(tokens, ms - self._base_ms(tokens, batch), noise, base_noise)
        return tokens / batch, added / batch

    def _added_ms(self, tokens: Array, batch: int, context: int) -> Array:
        measured = self._surcharge[context]
        if not measured:
            return np.zeros_like(tokens)
        return batch * between(measured, batch, lambda known: np.interp(tokens / batch, *measured[known]))


def _last_slope(tokens: Array, ms: Array) -> float:
    if len(tokens) < 2:
        return 0.0
    return max(0.0, float((ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])))


def _flatten_noise(tokens: Array, ms: Array, noise: Array, other_noise: Array | float = 0.0) -> Array:
    ms = smooth_within_noise(np.log2(tokens), ms, noise + other_noise, NEIGHBOURS)
    # A point without noise outweighs all others, but must not divide by zero.
    weights = 1.0 / np.square(np.maximum(noise, 1e-6))
    return pool_adjacent(ms, weights, noise + other_noise)


def _extend_by_larger_batches(base: dict[int, tuple[Array, Array]]) -> tuple[Array, Array]:
    """One curve over all measured token counts: the fullest one, then the others where they reach further."""
    fullest = max(base, key=lambda batch: (len(base[batch][0]), -batch))
    tokens, ms = base[fullest]
    for batch in sorted(base):
        own_tokens, own_ms = base[batch]
        further = own_tokens > tokens[-1]
        if not further.any():
            continue
        # Joined without a jump where the two overlap: a difference of level is the batch's, not the tokens'.
        offset = ms[-1] - np.interp(tokens[-1], own_tokens, own_ms) if own_tokens[0] <= tokens[-1] else 0.0
        tokens, ms = np.append(tokens, own_tokens[further]), np.append(ms, np.maximum(own_ms[further] + offset, ms[-1]))
    return tokens, ms


def _group(points: Sequence[LatencyPoint]) -> dict[int, dict[int, tuple[Array, Array, Array]]]:
    """context -> batch -> (tokens ascending, ms, noise), repeated points averaged."""
    cells: dict[int, dict[int, dict[int, list[LatencyPoint]]]] = {}
    for point in points:
        cells.setdefault(point.context, {}).setdefault(point.batch, {}).setdefault(point.tokens, []).append(point)
    return {
        context: {
            batch: (
                np.array(sorted(repeats), dtype=np.float64),
                np.array([np.mean([p.ms for p in repeats[count]]) for count in sorted(repeats)]),
                np.array([np.mean([p.noise_ms for p in repeats[count]]) for count in sorted(repeats)]),
            )
            for batch, repeats in batches.items()
        }
        for context, batches in cells.items()
    }


def _group_draft(points: Sequence[DraftPoint]) -> dict[int, tuple[Array, Array]]:
    """batch -> (contexts ascending, ms), repeated points averaged."""
    cells: dict[int, dict[int, list[float]]] = {}
    for point in points:
        cells.setdefault(point.batch, {}).setdefault(point.context, []).append(point.ms)
    return {
        batch: (
            np.array(sorted(repeats), dtype=np.float64),
            np.array([np.mean(repeats[context]) for context in sorted(repeats)]),
        )
        for batch, repeats in cells.items()
    }


def _read_points(kind: type[Point], values: dict[str, Any], name: str) -> list[Point]:
    listed = values.get(name)
    if not isinstance(listed, list):
        raise ConfigError(describe(f"latency.{name}", listed, "is no list of points", REMEASURE))
    known = {f.name for f in fields(kind)}
    points = []
    for index, item in enumerate(listed):
        if not isinstance(item, dict) or set(item) != known:
            problem = f"is no point with the fields {', '.join(sorted(known))}"
            raise ConfigError(describe(f"latency.{name}[{index}]", item, problem, REMEASURE))
        points.append(kind(**item))
    return points


def _check_point(point: LatencyPoint | DraftPoint, where: str) -> None:
    for name, value in asdict(point).items():
        least = {"tokens": 1.0, "batch": 1.0}.get(name, 0.0)
        number = _number(value, f"{where}.{name}", least)
        if name == "ms" and number == 0:
            raise ConfigError(describe(f"{where}.ms", value, "is no time that a forward takes", REMEASURE))
        if name in ("tokens", "batch", "context") and number != int(number):
            raise ConfigError(describe(f"{where}.{name}", value, "is no whole number", REMEASURE))


def _number(value: object, field: str, least: float) -> float:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not math.isfinite(value) or value < least:  # type: ignore[arg-type, operator]
        raise ConfigError(describe(field, value, f"is no number of at least {least:g}", REMEASURE))
    return float(value)  # type: ignore[arg-type]
