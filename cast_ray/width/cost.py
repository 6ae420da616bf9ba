"""What rounds cost now: the measured table, kept true by the rounds' own times.

It chooses nothing. The table stays as it was measured; the corrections live as long as the engine.
"""

from __future__ import annotations

import math

import numpy as np

from cast_ray.width.curve import Array
from cast_ray.width.drift import Correction, Level
from cast_ray.width.latency import LatencyTable
from cast_ray.width.shape import RoundShape, RoundTimes

# Contexts within one bucket (tokens) share a curve.
CONTEXT_BUCKET = 256
# Curves kept: some thousand numbers each.
MOST_CURVES = 64
# Nodes of a request over which its context's price for one is averaged.
PRICED_NODES = 15
LEAST_MS = 1e-3
# After a jump of the device so many drafted rounds verify this multiple of the candidates that seem best: whether other
# rounds jumped as well is not known otherwise. A slower device is looked at narrower, a faster one wider. Not again
# within so many drafted rounds.
LOOKS, NARROWER, WIDER, LOOK_AGAIN = 3, (0.25, 0.0), (4.0,), 64

# Kinds of rounds, which leave the host different work: without candidates, with a drafter's, with only such as were at
# hand.
PLAIN, DRAFTED, OFFERED = "plain", "drafted", "offered"


class RoundCost:
    """Predicted ms of rounds in which up to `max_nodes` candidates a request are verified."""

    def __init__(self, table: LatencyTable, max_nodes: int) -> None:
        self.table = table
        self.max_nodes = max_nodes
        self.verify = Correction()
        self._draft = Level()
        self._host: dict[tuple[str, int], Level] = {}  # by kind of round and octave of the batch
        self._curves: dict[tuple[int, int, bool], Array] = {}
        self._looks: list[float] = []
        self._since_look = LOOK_AGAIN

    def look(self) -> float | None:
        """The multiple of the best candidates that a drafted round should verify to see how the device has changed;
        None, as nearly always, for just those. Asked once a round."""
        self._since_look += 1
        return self._looks.pop(0) if self._looks else None

    def plain_ms(self, shape: RoundShape) -> float:
        """A round without candidates."""
        tokens = shape.batch + shape.chunk_tokens
        return float(self._verify_ms(shape, tokens, tokens + 1)[0]) + self._host_ms(shape.batch, PLAIN)

    def drafted_ms(self, shape: RoundShape) -> Array:
        """Rounds that draft and then verify M candidates in all, M = 0..batch * max_nodes; draft and host included."""
        first = shape.batch + shape.chunk_tokens
        ms = self._verify_ms(shape, first, first + shape.batch * self.max_nodes + 1)
        return ms + self.draft_ms(shape) + self._host_ms(shape.batch, DRAFTED)

    def offered_ms(self, shape: RoundShape) -> Array:
        """Rounds that verify M candidates that were at hand without drafting, M = 0..batch * max_nodes."""
        first = shape.batch + shape.chunk_tokens
        ms = self._verify_ms(shape, first, first + shape.batch * self.max_nodes + 1) + self._host_ms(
            shape.batch, OFFERED
        )
        ms[0] = self.plain_ms(shape)
        return ms

    def draft_ms(self, shape: RoundShape) -> float:
        """The drafter's forward, packing and choosing."""
        return self.table.draft_ms(shape.batch, shape.mean_context) * math.exp(self._draft.value)

    def prices(self, shape: RoundShape) -> Array:
        """[B] ms that a candidate of each request costs above (or below) the mean, for its context is longer."""
        contexts = np.asarray(shape.contexts, dtype=np.float64)
        marginal = self.table.context_price(contexts, shape.batch, PRICED_NODES) * self.verify.overall
        return marginal - marginal.mean()

    def observe(self, times: RoundTimes) -> None:
        """Let a finished round correct what is predicted for the next ones."""
        shape = times.shape
        predicted = self._curve(shape, times.tokens + 1)[times.tokens]
        computed = self._computed(shape, np.array(times.tokens, dtype=np.float64))
        jump = self.verify.observe(float(computed), predicted, times.verify_ms)
        if jump and self._since_look >= LOOK_AGAIN:
            self._since_look = 0
            self._looks = [share for share in (NARROWER if jump > 0 else WIDER) for _ in range(LOOKS)]
        if times.drafted and times.draft_ms > 0:
            self._draft.observe(math.log(times.draft_ms / self.table.draft_ms(shape.batch, shape.mean_context)))
        if times.host_ms > 0:
            bare = times.tokens == shape.batch + shape.chunk_tokens
            kind = DRAFTED if times.drafted else PLAIN if bare else OFFERED
            self._host_level(shape.batch, kind).observe(math.log(max(times.host_ms, LEAST_MS)))

    def report(self) -> dict[str, object]:
        """Plain values: by what factors measured times are above the table's."""
        host = {
            f"{kind} batch {2**octave}": math.exp(level.value) for (kind, octave), level in sorted(self._host.items())
        }
        return {"verify_factor": self.verify.overall, "draft_factor": math.exp(self._draft.value), "host_ms": host}

    def _verify_ms(self, shape: RoundShape, first: int, end: int) -> Array:
        curve = self._curve(shape, end)[first:end]
        return curve * self.verify.factor(self._computed(shape, np.arange(first, end, dtype=np.float64)))

    def _computed(self, shape: RoundShape, tokens: Array) -> Array:
        """Rows that forwards of so many tokens compute: those of their bucket, but for those with prompt chunks."""
        return tokens if shape.chunk_tokens else self.table.computed(tokens)

    def _curve(self, shape: RoundShape, end: int) -> Array:
        """The table's ms by packed tokens (the index), at least up to `end`, at this batch and context."""
        bucket = int(shape.mean_context) // CONTEXT_BUCKET
        eager = shape.chunk_tokens > 0
        key = (shape.batch, bucket, eager)
        known = self._curves.get(key)
        if known is None or len(known) < end:
            while len(self._curves) >= MOST_CURVES:
                del self._curves[next(iter(self._curves))]
            # Some room, so that a longer prompt chunk does not ask for a new one.
            length = max(end, shape.batch * (self.max_nodes + 1) + 1) + 512
            middle = (bucket + 0.5) * CONTEXT_BUCKET
            known = self.table.verify_ms(np.arange(length), shape.batch, middle, eager=eager)
            self._curves[key] = known
        return known

    def _host_level(self, batch: int, kind: str) -> Level:
        key = (kind, round(math.log2(batch)))
        known = self._host.get(key)
        if known is None:
            known = self._host[key] = Level(math.log(max(self.table.host_ms, LEAST_MS)))
        return known

    def _host_ms(self, batch: int, kind: str) -> float:
        return math.exp(self._host_level(batch, kind).value)
