"""One decoding round: draft, pack, choose, verify, accept, commit. Prompt chunks ride along in the verifying forward.

Who takes part is the scheduler's business, where a request ends the engine's; a round only computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.engine.scheduler import Plan, Sequence
from cast_ray.models.attention.base import Step
from cast_ray.models.flatten import Flattened, PromptChunk, Roots, flatten_trees, make_step
from cast_ray.models.kv_cache import slots_of
from cast_ray.models.target import Target
from cast_ray.sampling.keyed import choose_tokens
from cast_ray.trees.accept import Accepted, accept
from cast_ray.trees.pack import pack, pack_chain
from cast_ray.trees.tree import CandidateTree, no_tree
from cast_ray.width.policy import WidthPolicy

# Given a request and the tokens that a round would commit: those to keep, and whether the request ends with them.
Cut = Callable[[Sequence, list[int]], tuple[list[int], bool]]


@dataclass(frozen=True)
class Outcome:
    """What a step did.

    committed: tokens that each decoding request gained, in the plan's order; widths: its nodes verified; drafted:
    whether the drafter ran. Times in wall ms; `verify_ms` is the target's forward with the choice of tokens.
    """

    committed: list[list[int]]
    widths: list[int]
    drafted: bool
    draft_ms: float
    verify_ms: float
    host_ms: float


@dataclass(frozen=True)
class _Batch:
    """The decoding requests as tensors: seeds `[B]` int64; temperatures `[B]` float32, None when all are greedy."""

    roots: Roots
    seeds: Tensor
    temperatures: Tensor | None


class RoundRunner:
    """Rounds over one target, drafter and policy. `max_context` in tokens; `top_k` candidates a depth."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: WidthPolicy,
        *,
        page_size: int,
        top_k: int,
        max_context: int,
    ) -> None:
        self.target = target
        self.drafter = drafter if policy.max_nodes else None
        self.policy = policy
        self.page_size = page_size
        self.top_k = top_k if policy.branching else 1
        self.max_context = max_context

    def run(self, plan: Plan, tables: Tensor, cut: Cut) -> Outcome:
        """One step. tables: `[rows, P]` int64, the scheduler's block tables."""
        if not plan.decoding:
            return self._run_prompts(plan, tables)
        clock = _Clock()
        batch = _gather(plan.decoding, tables)

        tree, drafted = self._draft(batch)
        chosen = self._choose(tree, batch) if drafted else torch.zeros_like(batch.seeds)
        widths: list[int] = chosen.tolist()
        masses, tree = tree.masses, tree.slice(max(widths))
        draft_ms = clock.lap()

        rows = flatten_trees(batch.roots, tree, widths, self.page_size, self.max_context - 1)
        step = make_step(rows, _prompt_chunks(plan, tables), self.page_size)
        plan_ms = clock.lap()

        output = self.target.forward(step, torch.arange(rows.group.rows, device=tables.device))
        emitted = rows.unflatten(_emit(output.logits, rows, batch))
        accepted = accept(emitted, tree, chosen, rows.mask)
        read = torch.cat([accepted.lengths[:, None], accepted.tokens], dim=1).tolist()
        verify_ms = clock.lap()

        if drafted:
            self.policy.observe(masses, chosen, accepted.path, accepted.lengths)
        committed, going_on = [], []
        for sequence, (length, *tokens) in zip(plan.decoding, read, strict=True):
            kept, ends = cut(sequence, tokens[:length])
            committed.append(kept)
            going_on.append(0 if ends else len(kept))
        self._commit(batch.roots, rows, accepted, going_on, output.features)
        self._commit_prompts(plan, step, rows.group.rows, output.features)
        host_ms = plan_ms + clock.lap()
        if not drafted:
            draft_ms, host_ms = 0.0, host_ms + draft_ms
        return Outcome(committed, widths, drafted, draft_ms, verify_ms, host_ms)

    def _run_prompts(self, plan: Plan, tables: Tensor) -> Outcome:
        clock = _Clock()
        step = make_step(None, _prompt_chunks(plan, tables), self.page_size)
        nothing = torch.empty(0, dtype=torch.int64, device=tables.device)
        output = self.target.forward(step, nothing)
        self._commit_prompts(plan, step, 0, output.features)
        return Outcome([], [], False, 0.0, clock.lap(), 0.0)

    def _draft(self, batch: _Batch) -> tuple[CandidateTree, bool]:
        """Steps 1 and 2: the drafter's scores as a tree of the widest width; no nodes when drafting does not pay."""
        roots = batch.roots
        if self.drafter is None or not self.policy.drafts(len(roots.lengths), _mean(roots.lengths)):
            return no_tree(len(roots.lengths), roots.tokens.device), False
        contexts = DraftContexts(roots.tokens, roots.lengths, roots.positions, roots.tables, batch.temperatures)
        scores = self.drafter.propose(contexts, self.top_k)
        return (pack if self.policy.branching else pack_chain)(scores, self.policy.max_nodes), True

    def _choose(self, tree: CandidateTree, batch: _Batch) -> Tensor:
        """Step 3: nodes to verify, `[B]` int64."""
        lengths = batch.roots.lengths
        return self.policy.choose(tree.masses, tree.counts, len(lengths), _mean(lengths))

    def _commit(
        self, roots: Roots, rows: Flattened, accepted: Accepted, kept: list[int], features: Tensor | None
    ) -> None:
        """Step 6: the path's KV entries move to their places behind the root; its features go to the drafter.

        kept: committed tokens of each request that goes on, 0 for one that ends: nobody will read its entries.
        """
        device = roots.tokens.device
        places = torch.arange(accepted.path.shape[1], device=device)
        real = places < torch.tensor(kept, device=device)[:, None]
        positions = roots.positions[:, None] + places
        target_slots = slots_of(roots.tables, positions, self.page_size)
        astray = real & (accepted.path != places)
        source = slots_of(roots.tables, roots.positions[:, None] + accepted.path, self.page_size)
        self.target.cache.move(source[astray], target_slots[astray])
        if self.drafter is not None and features is not None:
            source_rows = (rows.starts[:, None] + accepted.path)[real]
            self.drafter.observe(features[source_rows], target_slots[real], positions[real])

    def _commit_prompts(self, plan: Plan, step: Step, first_row: int, features: Tensor | None) -> None:
        for chunk in plan.chunks:
            chunk.sequence.cached = chunk.end
        if self.drafter is not None and features is not None and plan.chunks:
            rows = slice(first_row, None)
            self.drafter.observe(features[rows], step.slots[rows], step.positions[rows])


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Milliseconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return (self._last - last) * 1000


def _gather(sequences: list[Sequence], tables: Tensor) -> _Batch:
    device = tables.device
    lengths = [len(s.tokens) - 1 for s in sequences]
    roots = Roots(
        tokens=torch.tensor([s.tokens[-1] for s in sequences], device=device),
        positions=torch.tensor(lengths, device=device),
        lengths=lengths,
        tables=tables[torch.tensor([s.row for s in sequences], device=device)],
    )
    temperatures = None
    if any(s.params.temperature for s in sequences):
        temperatures = torch.tensor([float(s.params.temperature) for s in sequences], device=device)
    return _Batch(roots, torch.tensor([s.seed for s in sequences], device=device), temperatures)


def _prompt_chunks(plan: Plan, tables: Tensor) -> list[PromptChunk]:
    return [
        PromptChunk(chunk.sequence.tokens[chunk.start : chunk.end], chunk.start, tables[chunk.sequence.row])
        for chunk in plan.chunks
    ]


def _emit(logits: Tensor, rows: Flattened, batch: _Batch) -> Tensor:
    """The target's own token after every row, `[rows]` int64; each belongs to the position behind its row's."""
    if batch.temperatures is None:
        return choose_tokens(logits, None, batch.seeds, rows.positions)
    request = rows.request
    return choose_tokens(logits, batch.temperatures[request], batch.seeds[request], rows.positions + 1)


def _mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths)
