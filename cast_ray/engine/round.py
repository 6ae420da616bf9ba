"""One decoding round: look up, draft, pack, choose, verify, accept, commit. Prompt chunks ride along in the verifying
forward.

Who takes part is the scheduler's business, where a request ends the engine's; a round only computes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.drafters.lookup import Lookup
from cast_ray.engine.emission import Emission, score_prompt
from cast_ray.engine.health import DrafterHealth
from cast_ray.engine.packing import Packing
from cast_ray.engine.readback import read_back
from cast_ray.engine.scheduler import Chunk, Plan
from cast_ray.engine.sequence import Sequence
from cast_ray.engine.tally import count_accepted, drafter_record, path_sources
from cast_ray.engine.trace import trace_rounds
from cast_ray.models.attention.base import Step
from cast_ray.models.flatten import Flattened, PromptChunk, Roots, flatten_trees, make_step
from cast_ray.models.target import Target, TargetOutput
from cast_ray.models.transfer import upload
from cast_ray.trees.accept import Accepted, accept
from cast_ray.trees.edit import set_aside
from cast_ray.trees.merge import Offer, chain_of, merge
from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree, no_tree
from cast_ray.width.policy import WidthPolicy
from cast_ray.width.shape import RoundShape, RoundTimes

# Given a request and the tokens that a round would commit: takes in those that the request keeps, and returns them.
Cut = Callable[[Sequence, list[int]], list[int]]


@dataclass(frozen=True)
class Outcome:
    """What a step did.

    committed: tokens that each decoding request gained, in the plan's order; widths: its nodes verified; drafted:
    whether the drafter ran. accepted: of each request, candidates accepted by source, see `tally.SOURCES`.
    Times in wall ms: `verify_ms` is the target's forward with the choice of tokens, `draft_ms` the drafter's; host: the
    rest by stage, `lookup`, `pack`, `choose`, `plan`, `accept` and `commit`.
    """

    committed: list[list[int]]
    widths: list[int]
    drafted: bool
    draft_ms: float
    verify_ms: float
    host: dict[str, float]
    accepted: list[list[int]]


class RoundRunner:
    """Rounds over one target, drafter and policy. `max_context` in tokens; `top_k` candidates a depth.

    lookup: what offers candidates without drafting, None for nothing.
    max_nodes: the widest tree that the engine has room for; the policy's own may be narrower.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: WidthPolicy,
        *,
        page_size: int,
        top_k: int,
        max_context: int,
        max_nodes: int,
        health: DrafterHealth | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        self.target = target
        self.health = health
        self.drafter = drafter if policy.max_nodes else None
        self.lookup = lookup if policy.max_nodes else None
        self.policy = policy
        self.page_size = page_size
        self.top_k = top_k if policy.branching else 1
        self.max_context = max_context
        self.max_nodes = max_nodes
        self._packing = Packing(
            target.device, nodes=policy.max_nodes, branching=policy.branching, captured=target.graphs is not None
        )

    def run(self, plan: Plan, tables: Tensor, cut: Cut) -> Outcome:
        """One step. tables: `[rows, P]` int64, the scheduler's block tables."""
        if not plan.decoding:
            return self._run_prompts(plan, tables)
        clock = _Clock()
        roots = _gather(plan.decoding, tables)
        emission = Emission(plan.decoding, self.target.vocab_size, tables.device)
        prompt_tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
        clock.lap("plan")
        offer = self._look_up(plan.decoding, emission)
        shape = RoundShape(roots.lengths, prompt_tokens, emission.temperatures, offer)
        clock.lap("lookup")

        scores = self._draft(roots, emission, shape)
        clock.lap("draft")
        drafted = scores is not None
        shape = replace(shape, drafted=drafted)
        packed = self._pack(scores, offer, roots)
        packed = emission.constrain(packed, self.max_nodes, chains=self.target.states is not None)
        clock.lap("pack")
        offered = packed if emission.foreign is None else packed.slice(self.policy.max_nodes)
        choosing = drafted or offer is not None
        chosen = emission.widen(self.policy.choose(offered, shape) if choosing else None)
        clock.lap("choose")
        # Here the host waits for the drafter, unless it did so to choose; for the target it waits in `read_back`.
        widths = chosen.tolist() if chosen is not None else [0] * shape.batch
        if chosen is not None and chosen.device != tables.device:
            chosen = upload(widths, tables.device)
        tree = packed.slice(max(widths))
        clock.lap("draft")

        rows = flatten_trees(roots, tree, widths, self.page_size, self.max_context - 1)
        step = make_step(rows, _prompt_chunks(plan, tables), self.page_size)
        clock.lap("plan")

        output = self.target.forward(step, _logit_rows(plan, rows.group.rows, tables.device))
        logits = output.logits[: rows.group.rows]
        emitted = emission.emit(logits, rows, tree, widths)
        clock.lap("verify")
        accepted = _accept(emitted, rows, tree, chosen)
        clock.lap("accept")
        lesson = None
        if choosing and chosen is not None:
            lesson = self._lesson(emission, offered, chosen, accepted, drafted)
        read = read_back(
            lengths=accepted.lengths,
            tokens=accepted.tokens,
            sources=path_sources(tree, accepted, emission.foreign),
            **(lesson.on_device if lesson is not None else {}),
        )
        clock.lap("verify")

        lengths: list[int] = read["lengths"].tolist()
        self._commit(roots, rows, accepted, lengths, output.features)
        self._commit_prompts(plan, step, rows.group.rows, output)
        if lesson is not None:
            self._learn(lesson, read, emission.temperatures)
        emitted_tokens, sources = read["tokens"].tolist(), read["sources"].tolist()
        committed = [
            cut(sequence, tokens[:length])
            for sequence, tokens, length in zip(plan.decoding, emitted_tokens, lengths, strict=True)
        ]
        credited = [
            count_accepted(row, length, len(kept))
            for row, length, kept in zip(sources, lengths, committed, strict=True)
        ]
        emission.report(logits, rows, accepted, committed)
        if traced := [row for row, sequence in enumerate(plan.decoding) if sequence.traced]:
            for row, trace in zip(traced, trace_rounds(traced, tree, widths, accepted, committed), strict=True):
                plan.decoding[row].trace = trace
        clock.lap("commit")
        if self.lookup is not None:
            self.lookup.observe(plan.decoding, committed, [s.ending is not None for s in plan.decoding])
        clock.lap("lookup")
        self._tell_times(clock, shape, drafted, len(step.tokens), sum(map(len, committed)))
        host = {stage: clock.ms[stage] for stage in ("lookup", "pack", "choose", "plan", "accept", "commit")}
        return Outcome(committed, widths, drafted, clock.ms["draft"], clock.ms["verify"], host, credited)

    def _run_prompts(self, plan: Plan, tables: Tensor) -> Outcome:
        clock = _Clock()
        step = make_step(None, _prompt_chunks(plan, tables), self.page_size)
        output = self.target.forward(step, _logit_rows(plan, 0, tables.device))
        self._commit_prompts(plan, step, 0, output)
        clock.lap("verify")
        return Outcome([], [], False, 0.0, clock.ms["verify"], {}, [])

    def _tell_times(self, clock: _Clock, shape: RoundShape, drafted: bool, tokens: int, committed: int) -> None:
        """The policy hears what the round took; packing and choosing are a part of drafting, as the probe has it."""
        ms = clock.ms
        drafting = ms["pack"] + ms["choose"]
        host = ms["lookup"] + ms["plan"] + ms["accept"] + ms["commit"]
        host += 0.0 if drafted else drafting + ms["draft"]
        draft = ms["draft"] + drafting if drafted else 0.0
        self.policy.timed(RoundTimes(shape, tokens, drafted, draft, ms["verify"], host, committed))

    def _lesson(
        self, emission: Emission, offered: CandidateTree, chosen: Tensor, accepted: Accepted, drafted: bool
    ) -> _Lesson:
        """What a round with candidates shows, as it is to be read from the device."""
        widths = chosen
        if emission.foreign is not None:
            offered, widths, accepted = set_aside(emission.foreign, offered, chosen, accepted)
        parts = {"widths": widths, "path": accepted.path, "path_lengths": accepted.lengths}
        if self.health is not None and drafted:
            parts["record"] = drafter_record(offered, widths, accepted)
        return _Lesson(offered, parts)

    def _learn(self, lesson: _Lesson, read: dict[str, Tensor], temperatures: Tensor | None) -> None:
        """Tell the policy, and the watch over the drafter where that ran. All but the tree is on the host by now."""
        accepted = Accepted(read["path"], read["path_lengths"], read["tokens"])
        self.policy.observe(lesson.offered, read["widths"], accepted, temperatures)
        if self.health is not None and "record" in read:
            requests, hits, promised = read["record"].sum(dim=0).tolist()
            self.health.observe(int(requests), hits, promised)

    def _look_up(self, decoding: list[Sequence], emission: Emission) -> Offer | None:
        """Before step 1: candidates that earlier text suggests, at next to no cost."""
        if self.lookup is None or not emission.draftable:
            return None
        return self.lookup.propose(decoding, self.policy.max_nodes)

    def _draft(self, roots: Roots, emission: Emission, shape: RoundShape) -> DraftScores | None:
        """Step 1: the drafter's scores, None when drafting does not pay: then the drafter does not run at all."""
        if self.drafter is None or not emission.draftable or not self.policy.drafts(shape):
            return None
        if self.health is not None and not self.health.may_draft():
            return None
        contexts = DraftContexts(roots.tokens, roots.lengths, roots.positions, roots.tables, emission.temperatures)
        return emission.shape(self.drafter.propose(contexts, self.top_k), roots.positions)

    def _pack(self, scores: DraftScores | None, offer: Offer | None, roots: Roots) -> CandidateTree:
        """Step 2: the scores as a tree of the widest width, with what was offered; no nodes where there is neither."""
        most, device = self.policy.max_nodes, roots.tokens.device
        if scores is None:
            tree = offer.to_tree(device) if offer is not None else no_tree(len(roots.lengths), device)
        else:
            tree = self._packing(scores)
            if offer is not None:
                tree = merge(tree, offer, most)
        return tree if offer is None or self.policy.branching else chain_of(tree)

    def _commit(
        self, roots: Roots, rows: Flattened, accepted: Accepted, lengths: list[int], features: Tensor | None
    ) -> None:
        """Step 6: the path's KV entries move to their places behind the root; its features go to the drafter.

        The whole path moves, of a request that ends on it too: its pages reach that far, and whole ones are kept for
        others with the same prefix. lengths: those of `accepted` as numbers, so that nothing is waited for.
        """
        if self.target.states is not None:
            self.target.states.keep(accepted.lengths)
        drafter = self.drafter if features is not None else None
        if accepted.path.shape[1] == 1:  # roots alone: they are where they belong
            if drafter is not None and features is not None:
                drafter.observe(features[rows.starts], rows.slots[rows.starts], roots.positions)
            return
        # Entries of all paths in one line, the roots first: those are where they belong.
        batch, device, total = len(lengths), roots.tokens.device, sum(lengths)
        every = torch.arange(batch, device=device)
        owner = torch.repeat_interleave(every, accepted.lengths - 1, output_size=total - batch)
        ends = (accepted.lengths - 1).cumsum(0)
        place = torch.arange(1, total - batch + 1, device=device) - (ends - accepted.lengths + 1)[owner]
        entry = accepted.path[owner, place]
        positions = roots.positions[owner] + place
        slots = self._slots(roots, owner, positions)
        if total > batch:
            self.target.cache.move(self._slots(roots, owner, roots.positions[owner] + entry), slots)
        if drafter is not None and features is not None:
            source_rows = torch.cat([rows.starts, rows.starts[owner] + entry])
            root_slots = rows.slots[rows.starts]
            places = torch.cat([roots.positions, positions])
            drafter.observe(features[source_rows], torch.cat([root_slots, slots]), places)

    def _slots(self, roots: Roots, owner: Tensor, index: Tensor) -> Tensor:
        """Where tokens `index` `[n]` of the requests `owner` `[n]` lie in the pool."""
        page = torch.div(index, self.page_size, rounding_mode="floor")
        return roots.tables[owner, page] * self.page_size + index % self.page_size

    def _commit_prompts(self, plan: Plan, step: Step, first_row: int, output: TargetOutput) -> None:
        """Chunks are in the cache: their features go to the drafter, their logits to those who want them scored."""
        first_logits = first_row
        for chunk in plan.chunks:
            chunk.sequence.cached = chunk.end
            if _scored(chunk):
                logits = output.logits[first_logits : (first_logits := first_logits + chunk.end - chunk.start)]
                score_prompt(chunk.sequence, chunk.start, logits)
        if self.drafter is not None and output.features is not None and plan.chunks:
            rows = slice(first_row, None)
            self.drafter.observe(output.features[rows], step.slots[rows], step.positions[rows])


@dataclass(frozen=True)
class _Lesson:
    """offered: the tree as the policy saw it. on_device: what of the outcome is to be read, see `_learn`."""

    offered: CandidateTree
    on_device: dict[str, Tensor]


class _Clock:
    """Wall ms by stage; a stage may have several laps. Nothing is waited for: a stage on a device is its launch."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to `stage`."""
        now = time.perf_counter()
        self.ms[stage] += (now - self._last) * 1000
        self._last = now


def _gather(sequences: list[Sequence], tables: Tensor) -> Roots:
    device = tables.device
    lengths = [len(s.tokens) - 1 for s in sequences]
    owners = upload([s.row for s in sequences], device)
    return Roots(
        tokens=upload([s.tokens[-1] for s in sequences], device),
        positions=upload(lengths, device),
        lengths=lengths,
        tables=tables[owners],
        owners=owners,
    )


def _prompt_chunks(plan: Plan, tables: Tensor) -> list[PromptChunk]:
    return [
        PromptChunk(chunk.sequence.tokens[chunk.start : chunk.end], chunk.start, tables[row], row)
        for chunk in plan.chunks
        for row in (chunk.sequence.row,)
    ]


def _accept(emitted: Tensor, rows: Flattened, tree: CandidateTree, chosen: Tensor | None) -> Accepted:
    """Step 5: the path of each tree that the target's own tokens follow; of a root alone there is nothing to walk."""
    if chosen is None:
        path = torch.zeros_like(emitted)[:, None]
        return Accepted(path, torch.ones_like(emitted), emitted[:, None])
    return accept(rows.unflatten(emitted), tree, chosen, rows.mask)


def _scored(chunk: Chunk) -> bool:
    """Whether the chunk's own logits are wanted, which are those of the prompt's next tokens."""
    return chunk.sequence.emitting is not None and chunk.sequence.emitting.missing_prompt_logprobs


def _logit_rows(plan: Plan, tree_rows: int, device: torch.device) -> Tensor:
    """Rows of the forward whose logits are wanted: all of trees, those of chunks to be scored."""
    trees, start = torch.arange(tree_rows, device=device), tree_rows
    scored = [trees]
    for chunk in plan.chunks:
        end = start + chunk.end - chunk.start
        if _scored(chunk):
            scored.append(torch.arange(start, end, device=device))
        start = end
    return torch.cat(scored) if len(scored) > 1 else trees
