"""One decoding round: look up, draft, pack, choose, verify, accept, commit. Prompt chunks ride along in the verifying
forward.

Who takes part is the scheduler's business, where a request ends the engine's; a round only computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.drafters.lookup import Lookup
from cast_ray.engine.chunks import commit_chunks, logit_rows, prompt_chunks
from cast_ray.engine.clock import Clock
from cast_ray.engine.commit import commit
from cast_ray.engine.emission import Emission
from cast_ray.engine.health import DrafterHealth
from cast_ray.engine.lesson import Lesson, make_lesson, teach
from cast_ray.engine.packing import Packing
from cast_ray.engine.readback import read_back
from cast_ray.engine.scheduler import Plan
from cast_ray.engine.sequence import Sequence
from cast_ray.engine.tally import path_sources
from cast_ray.engine.trace import trace_rounds
from cast_ray.models.flatten import Flattened, Roots, flatten_trees, make_step
from cast_ray.models.target import Target
from cast_ray.transfer import upload
from cast_ray.trees.accept import Accepted, accept
from cast_ray.trees.merge import Offer, chain_of, merge
from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree, no_tree
from cast_ray.width.policy import WidthPolicy
from cast_ray.width.shape import RoundShape, RoundTimes

# Given a request and the tokens that a round would commit: takes in those that the request keeps, and returns them.
Cut = Callable[[Sequence, list[int]], list[int]]
# What the host does while the device works.
Meanwhile = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """What a step did.

    committed: tokens that each decoding request gained, in the plan's order; widths: its nodes verified; drafted:
    whether the drafter ran. lengths: its round length; sources: of its path, see `tally.path_sources`.
    Times in wall ms: `verify_ms` is the target's forward with the choice of tokens, `draft_ms` the drafter's; host: the
    rest by stage, `lookup`, `pack`, `choose`, `plan`, `accept` and `commit`.
    tell: gives the requests what they asked to know of the round. It may wait, but is called once, before the next.
    """

    committed: list[list[int]]
    widths: list[int]
    drafted: bool
    draft_ms: float
    verify_ms: float
    host: dict[str, float]
    lengths: list[int]
    sources: list[list[int]]
    tell: Callable[[], None]


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
        # Looking at values is free where they are the host's own. Where forwards are replayed it is not, or not meant.
        self._fixed = target.device.type != "cpu" or target.graphs is not None

    def run(self, plan: Plan, tables: Tensor, cut: Cut, meanwhile: Meanwhile) -> Outcome:
        """One step. tables: `[rows, P]` int64, the scheduler's block tables.

        meanwhile: called once, when the device has work of this step and before the host waits for it.
        """
        if not plan.decoding:
            return self._run_prompts(plan, tables, meanwhile)
        clock = Clock()
        roots = _gather(plan.decoding, tables)
        emission = Emission(plan.decoding, self.target.vocab_size, tables.device, fixed=self._fixed)
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
        clock.lap("pack")
        if drafted:
            meanwhile()
            clock.lap("draft")
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
        step = make_step(rows, prompt_chunks(plan, tables), self.page_size)
        clock.lap("plan")

        output = self.target.forward(step, logit_rows(plan, rows.group.rows, tables.device))
        logits = output.logits[: rows.group.rows]
        emitted = emission.emit(logits, rows, tree, widths)
        clock.lap("verify")

        def walk(tokens: Tensor) -> tuple[Accepted, Lesson | None, dict[str, Tensor]]:
            """Step 5, and what the host must know of it."""
            accepted = _accept(tokens, rows, tree, chosen)
            lesson = None
            if choosing and chosen is not None:
                health = self.health if drafted else None
                lesson = make_lesson(emission.foreign, offered, chosen, accepted, emission.temperatures, health=health)
            return (
                accepted,
                lesson,
                {
                    "lengths": accepted.lengths,
                    "tokens": accepted.tokens,
                    "sources": path_sources(tree, accepted, emission.foreign),
                    **(lesson.on_device if lesson is not None else {}),
                    **emission.scores.find(logits, rows.starts, accepted, fixed=self._fixed),
                },
            )

        accepted, lesson, parts = walk(emitted.tokens)
        if emitted.unsure is not None:
            parts["unsure"] = emitted.unsure.any().expand(shape.batch)
        clock.lap("accept")
        if not drafted:
            meanwhile()
        read = read_back(**parts)
        if emitted.unsure is not None and read["unsure"].any():
            accepted, lesson, parts = walk(emission.emit_surely(logits, rows, tree, widths))
            read = read_back(**parts)
        clock.lap("verify")

        lengths: list[int] = read["lengths"].tolist()
        features = output.features
        commit(self.target, self.drafter, roots, rows, accepted, lengths, features, self.page_size)
        commit_chunks(plan, step, rows.group.rows, output, self.drafter)
        if lesson is not None:
            teach(lesson, read, emission.temperatures, self.policy, self.health)
        committed = [
            cut(sequence, tokens[:length])
            for sequence, tokens, length in zip(plan.decoding, read["tokens"].tolist(), lengths, strict=True)
        ]
        emission.learn_labels(logits, widths)
        if traced := [row for row, sequence in enumerate(plan.decoding) if sequence.traced]:
            for row, trace in zip(traced, trace_rounds(traced, tree, widths, accepted, committed), strict=True):
                plan.decoding[row].trace = trace
        clock.lap("commit")
        if self.lookup is not None:
            self.lookup.observe(plan.decoding, committed, [s.ending is not None for s in plan.decoding])
        clock.lap("lookup")
        self._tell_times(clock, shape, drafted, len(step.tokens), sum(map(len, committed)))
        host = {stage: clock.ms[stage] for stage in ("lookup", "pack", "choose", "plan", "accept", "commit")}
        return Outcome(
            committed,
            widths,
            drafted,
            clock.ms["draft"],
            clock.ms["verify"],
            host,
            lengths,
            read["sources"].tolist(),
            lambda: emission.scores.tell(read, committed),
        )

    def _run_prompts(self, plan: Plan, tables: Tensor, meanwhile: Meanwhile) -> Outcome:
        clock = Clock()
        step = make_step(None, prompt_chunks(plan, tables), self.page_size)
        output = self.target.forward(step, logit_rows(plan, 0, tables.device))
        meanwhile()
        commit_chunks(plan, step, 0, output, self.drafter)
        clock.lap("verify")
        return Outcome([], [], False, 0.0, clock.ms["verify"], {}, [], [], lambda: None)

    def _tell_times(self, clock: Clock, shape: RoundShape, drafted: bool, tokens: int, committed: int) -> None:
        """The policy hears what the round took; packing and choosing are a part of drafting, as the probe has it."""
        ms = clock.ms
        drafting = ms["pack"] + ms["choose"]
        host = ms["lookup"] + ms["plan"] + ms["accept"] + ms["commit"]
        host += 0.0 if drafted else drafting + ms["draft"]
        draft = ms["draft"] + drafting if drafted else 0.0
        self.policy.timed(RoundTimes(shape, tokens, drafted, draft, ms["verify"], host, committed))

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


def _accept(emitted: Tensor, rows: Flattened, tree: CandidateTree, chosen: Tensor | None) -> Accepted:
    """Step 5: the path of each tree that the target's own tokens follow; of a root alone there is nothing to walk."""
    if chosen is None:
        path = torch.zeros_like(emitted)[:, None]
        return Accepted(path, torch.ones_like(emitted), emitted[:, None])
    return accept(rows.unflatten(emitted), tree, chosen, rows.mask)
