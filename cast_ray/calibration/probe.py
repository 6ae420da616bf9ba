"""Measures this device: the target's and the drafter's forward over packed tokens, batch and context, and the host.

Random tokens over a pool filled with noise: what is measured is time, not text. Points are taken in order of worth and
the probe stops when its time is up, so a slow device gets a coarser table, never a late start. Where the curve bends it
looks closer (`plan`), and time that is left goes to a second look at the first points.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cast_ray.calibration.plan import coarse_counts, next_count
from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.models.flatten import Roots, flatten_trees, make_step
from cast_ray.models.target import Target
from cast_ray.sampling.keyed import choose_tokens
from cast_ray.trees.accept import accept
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree, ancestor_mask, no_tree
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable

# Points beyond the coarse ones that the curve at batch 1 may get.
CLOSER_POINTS = 12
# Of the time, what a second look may take.
SECOND_LOOK = 0.25
BASE_CONTEXT = 256
LONG_CONTEXTS = (1024, 4096)
VERY_LONG_CONTEXT = 16384  # not on a CPU, which would take minutes to look at it
# A point is timed until it has been run often enough, or long enough and at least a few times.
MOST_REPEATS, LEAST_REPEATS, SECONDS_A_POINT = 9, 3, 0.25
# Two runs that differ by less than this share agree.
AGREE = 0.03
# Beyond batch 1: a few widths, and no forward of more tokens than this or the largest bucket.
BATCH_WIDTHS = (0, 3, 7, 15, 31)
MOST_TOKENS = 256


class Probe:
    """Measurements over one target and drafter.

    max_batch, max_nodes: what the engine may ask for. contexts are cut to `max_context` tokens.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        page_size: int,
        max_batch: int,
        max_nodes: int,
        max_context: int,
        top_k: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.page_size = page_size
        self.max_batch = max_batch
        self.max_nodes = max_nodes
        self.top_k = top_k
        self.buckets = target.graphs.buckets if target.graphs is not None else None
        self._most_tokens = max(MOST_TOKENS, self.buckets.tokens[-1] if self.buckets is not None else 0)
        self._room = max_nodes + 1 if drafter is None else max(max_nodes + 1, drafter.block_size)
        slots = target.cache.slots
        self._max_context = min(max_context, slots) - self._room
        self._slots = slots

    def settings(self) -> dict[str, Any]:
        """What decides which points there are: a part of the key of profiles."""
        return {
            "max_batch": self.max_batch,
            "max_nodes": self.max_nodes,
            "max_context": self._max_context,
            "top_k": self.top_k,
            "page_size": self.page_size,
            "buckets": None if self.buckets is None else self.buckets.to_list(),
        }

    @torch.inference_mode()
    def measure(self, seconds: float, known: LatencyTable | None = None) -> tuple[LatencyTable, bool]:
        """The table of this device, within about `seconds`; False says that the time was up before all was measured.

        known: what an earlier run had measured when its time was up; it is kept and gone on from.
        """
        deadline = time.perf_counter() + seconds
        verify: list[LatencyPoint] = list(known.verify) if known else []
        draft: list[DraftPoint] = list(known.draft) if known else []
        verified = {(point.tokens, point.batch, point.context) for point in verify}
        drafted = {(point.batch, point.context) for point in draft}
        self.fill_pool()
        complete = True
        for batch, context, nodes in self._points(verify):
            if (batch, context) in drafted if nodes is None else (batch * (nodes + 1), batch, context) in verified:
                continue
            # The first verification and the first draft are needed whatever they take.
            needed = not draft if nodes is None else not verify
            if not needed and time.perf_counter() > deadline:
                complete = False
                break
            if nodes is None:
                median, noise = self._time(self.drafting(batch, context))
                draft.append(DraftPoint(batch, context, median, noise))
            else:
                median, noise = self._time(self.verifying(batch, context, nodes))
                verify.append(LatencyPoint(batch * (nodes + 1), batch, context, median, noise))
        if complete:
            self._look_again(verify, min(deadline, time.perf_counter() + SECOND_LOOK * seconds))
        return LatencyTable(verify, draft, self._host_ms(), self.buckets), complete

    def _look_again(self, verify: list[LatencyPoint], deadline: float) -> None:
        """Measure the points of batch 1 once more: what differs from minute to minute is noise as well."""
        for index, point in enumerate(verify):
            if time.perf_counter() > deadline:
                return
            if point.batch == 1 and point.context == self._base:
                ms, noise = self._time(self.verifying(1, point.context, point.tokens - 1))
                spread = max(point.noise_ms, noise, abs(ms - point.ms) / 2)
                verify[index] = replace(point, ms=(ms + point.ms) / 2, noise_ms=spread)

    @property
    def _base(self) -> int:
        return max(1, min(BASE_CONTEXT, self._max_context))

    def _points(self, verify: list[LatencyPoint]) -> Iterator[tuple[int, int, int | None]]:
        """(batch, context, nodes a request) to verify, or nodes None to draft, the most telling first.

        Batch 1 at coarse widths, the largest batch, closer looks at batch 1 where its curve bends, longer contexts,
        and then the batches in between. verify: what was measured so far; the caller adds to it.
        """
        base = self._base
        if self.drafter is not None:
            yield 1, base, None
        coarse = coarse_counts(self.max_nodes + 1) if self.buckets is None else self._bucket_ends()
        for count in coarse:
            yield 1, base, count - 1
        batches = [b for b in (2, 4, 8, 16, 32, 64, 128, 256) if b <= self.max_batch and self._fits(b, base)]
        yield from self._batch_points(batches[-1:], base)
        # Between the ends of buckets there is nothing to see.
        for _ in range(CLOSER_POINTS if self.buckets is None else 0):
            curve = {p.tokens: (p.ms, p.noise_ms) for p in verify if (p.batch, p.context) == (1, base)}
            closer = next_count(curve) if len(curve) < len(coarse) + CLOSER_POINTS else None
            if closer is None:
                break
            yield 1, base, closer - 1
        longer = LONG_CONTEXTS if self.target.device.type == "cpu" else (*LONG_CONTEXTS, VERY_LONG_CONTEXT)
        contexts = sorted({min(c, self._max_context) for c in longer if self._max_context > base} - {base})
        for context in contexts:
            if self.drafter is not None:
                yield 1, context, None
            for nodes in (0, 7, 31):
                if nodes <= self.max_nodes:
                    yield 1, context, nodes
        yield from self._batch_points(batches[-2::-1], base)

    def _batch_points(self, batches: list[int], context: int) -> Iterator[tuple[int, int, int | None]]:
        for batch in batches:
            if self.drafter is not None:
                yield batch, context, None
            for nodes in BATCH_WIDTHS:
                if nodes <= self.max_nodes and (nodes == 0 or batch * (nodes + 1) <= self._most_tokens):
                    yield batch, context, nodes

    def _bucket_ends(self) -> list[int]:
        """Packed tokens of batch 1 at the end of every bucket; the widest tree where it lies beyond them."""
        assert self.buckets is not None
        most = self.max_nodes + 1
        return sorted({min(tokens, most) for tokens in self.buckets.tokens} | {most})

    def _fits(self, batch: int, context: int) -> bool:
        return batch * self._pages(context) * self.page_size <= self._slots

    def _pages(self, context: int) -> int:
        return -(-(context + self._room) // self.page_size)

    def fill_pool(self) -> None:
        """Noise where the measured requests lie: fresh memory may hold numbers that are slow to compute with."""
        largest = max((b * self._pages(c) for b, c, _ in self._points([])), default=1) * self.page_size
        for cache in (self.target.cache, getattr(self.drafter, "cache", None)):
            if cache is not None:
                cache.data[:, :, :largest].normal_()

    def _roots(self, batch: int, context: int) -> Roots:
        device = self.target.device
        pages = self._pages(context)
        return Roots(
            tokens=torch.randint(self.target.vocab_size, (batch,), device=device),
            positions=torch.full((batch,), context, device=device),
            lengths=[context] * batch,
            tables=torch.arange(batch * pages, device=device).view(batch, pages),
        )

    def verifying(self, batch: int, context: int, nodes: int) -> Callable[[], Tensor]:
        """One verification, to be timed: `nodes` candidates of each request, contexts of so many tokens."""
        roots = self._roots(batch, context)
        tree = self._random_tree(batch, nodes)
        seeds = torch.zeros(1, dtype=torch.int64, device=self.target.device)

        def forward() -> Tensor:
            rows = flatten_trees(roots, tree, [nodes] * batch, self.page_size, context + self._room)
            step = make_step(rows, [], self.page_size)
            output = self.target.forward(step, torch.arange(rows.group.rows, device=self.target.device))
            return choose_tokens(output.logits, None, seeds, seeds)

        return forward

    def drafting(self, batch: int, context: int) -> Callable[[], Tensor]:
        """One draft with its packing, to be timed."""
        drafter = self.drafter
        assert drafter is not None
        roots = self._roots(batch, context)
        contexts = DraftContexts(roots.tokens, roots.lengths, roots.positions, roots.tables, None)
        features = torch.randn(
            2 * batch, len(drafter.taps) * self.target.hidden_size, dtype=self.target.dtype, device=self.target.device
        )
        last = roots.tables[:, :1].expand(batch, 2).reshape(-1) * self.page_size

        def forward() -> Tensor:
            # A round brings about two committed tokens a request into the context.
            drafter.observe(features, last, torch.full_like(last, context))
            return pack(drafter.propose(contexts, self.top_k), self.max_nodes).masses

        return forward

    def _random_tree(self, batch: int, nodes: int) -> CandidateTree:
        if nodes == 0:
            return no_tree(batch, self.target.device)
        return pack(self._random_scores(batch), nodes)

    def _random_scores(self, batch: int) -> DraftScores:
        depth = self.drafter.block_size - 1 if self.drafter is not None else 7
        candidates = min(max(self.top_k, 8), self.target.vocab_size)
        logits = torch.randn(batch, depth, candidates, device=self.target.device)
        ids = torch.arange(logits.shape[-1], device=self.target.device).expand_as(logits)
        return DraftScores(logits.log_softmax(dim=-1), ids)

    def _host_ms(self) -> float:
        """Everything of a round at batch 1 but the two forwards, on a tree of middling width."""
        roots = self._roots(1, 8)
        tree = self._random_tree(1, min(15, self.max_nodes))
        widths = torch.tensor([tree.max_nodes], device=self.target.device)
        emitted = torch.randint(self.target.vocab_size, (1, tree.max_nodes + 1), device=self.target.device)

        def host() -> Tensor:
            flatten_trees(roots, tree, [tree.max_nodes], self.page_size, 8 + self._room)
            accepted = accept(emitted, tree, widths, ancestor_mask(tree, tree.max_nodes))
            self.target.cache.move(accepted.path[0], accepted.path[0])
            return accepted.lengths

        return self._time(host)[0]

    def _time(self, run: Callable[[], Tensor]) -> tuple[float, float]:
        """Median and noise (median absolute deviation) in ms of `run`, whose result is waited for.

        The first run warms up and does not count; but where it took long and the next took as long, both do, and more
        would tell little for their time.
        """
        taken: list[float] = []

        def once() -> float:
            started = time.perf_counter()
            run().flatten()[:1].tolist()
            return (time.perf_counter() - started) * 1000

        warm = once()
        began = time.perf_counter()
        if warm > 1000 * SECONDS_A_POINT:
            taken.append(once())
            if abs(taken[0] - warm) <= AGREE * taken[0]:
                return (taken[0] + warm) / 2, abs(taken[0] - warm) / 2
        while len(taken) < LEAST_REPEATS or (
            len(taken) < MOST_REPEATS and time.perf_counter() - began < SECONDS_A_POINT
        ):
            taken.append(once())
        median = statistics.median(taken)
        return median, statistics.median(abs(t - median) for t in taken)
