"""How the requests of a round emit: their seeds and temperatures, and for those that ask, rules and grammars.

Made anew each round from the requests' own state. A round in which nobody asks for anything special pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cast_ray.engine.scoring import PathScores
from cast_ray.engine.sequence import Sequence as Request
from cast_ray.models.flatten import Flattened
from cast_ray.sampling.emitting import Emitting
from cast_ray.sampling.grammar import Grammar, apply_bits
from cast_ray.sampling.keyed import choose_tokens
from cast_ray.sampling.processors import Paths, RuleBatch, Whole
from cast_ray.sampling.rules import Rules
from cast_ray.transfer import upload
from cast_ray.trees.edit import Nodes, read, replace, trunk
from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree


@dataclass(frozen=True)
class Emitted:
    """tokens: `[rows]` int64, the target's own after every row. unsure: `[rows]` bool, rows that have to be chosen
    again by looking at values; None for none."""

    tokens: Tensor
    unsure: Tensor | None = None


class Emission:
    """See the module.

    fixed: whether all shapes are to be such that no value decides them, so that nothing waits for the device.
    seeds: `[B]` int64. temperatures: `[B]` float32, None when all requests are greedy.
    draftable: whether a drafter can help any of them. foreign: `[B]` bool, requests whose candidates are not a
    drafter's alone and say nothing of it; None for none. scores: of those that want to know log probabilities.
    """

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device, *, fixed: bool = False
    ) -> None:
        self.seeds = upload([r.seed for r in requests], device)
        self.temperatures: Tensor | None = None
        if any(r.params.temperature for r in requests):
            self.temperatures = upload([float(r.params.temperature) for r in requests], device, torch.float32)
        self._device = device
        self._fixed = fixed
        self._asking: dict[int, Emitting] = {b: r.emitting for b, r in enumerate(requests) if r.emitting is not None}
        self._grammars: dict[int, Grammar] = {
            b: state.grammar for b, state in self._asking.items() if state.grammar is not None
        }
        self._trees: dict[int, Nodes] = {}
        self.draftable = len(self._grammars) < len(requests) or any(g.drafts_help for g in self._grammars.values())
        self.foreign = self._marked(self._grammars) if self._grammars else None
        self._rules: dict[int, Rules] = {}
        for b, state in self._asking.items():
            rules = state.rules(requests[b].tokens, vocab_size, device)
            if rules is not None:
                self._rules[b] = rules
        self._contexts = [requests[b].tokens for b in self._rules]
        self._batch = self._rule_batch(fixed) if self._rules else None
        self.scores = PathScores(self._asking, len(requests))

    def shape(self, scores: DraftScores, positions: Tensor) -> DraftScores:
        """What cannot be emitted has no mass. positions: `[B]` int64 of the roots."""
        return scores if self._batch is None else self._batch.shape(scores, positions)

    def constrain(self, tree: CandidateTree, most: int, chains: bool = False) -> CandidateTree:
        """The tree with what grammars forbid taken out and what they foresee put in, at most `most` nodes a request.

        chains: of each tree only its trunk, for targets that verify nothing else.
        """
        if not self._grammars:
            return tree
        drafted = read(tree, list(self._grammars))
        self._trees = {b: grammar.candidates(drafted[b], most) for b, grammar in self._grammars.items()}
        if chains:
            self._trees = {b: trunk(nodes) for b, nodes in self._trees.items()}
        return replace(tree, self._trees)

    def widen(self, chosen: Tensor | None) -> Tensor | None:
        """Nodes to verify `[B]` int64, None for none: those chosen, and at least what is certain or is to be known.

        On the host or on the device.
        """
        least = {b: self._least(b, nodes) for b, nodes in self._trees.items()}
        if not any(least.values()):
            return chosen
        wanted = torch.zeros_like(self.seeds)
        wanted.index_copy_(0, upload(list(least), self._device), upload(list(least.values()), self._device))
        return wanted if chosen is None else torch.maximum(chosen.to(self._device), wanted)

    def emit(self, logits: Tensor, rows: Flattened, tree: CandidateTree, widths: Sequence[int]) -> Emitted:
        """The target's own token after every row; each belongs to the position behind its row's.

        logits: `[rows, vocab]`, left as they are. tree: the verified slice; widths: nodes of each request.
        """
        return self._emit(logits, rows, tree, widths, self._batch, self._fixed)

    def emit_surely(self, logits: Tensor, rows: Flattened, tree: CandidateTree, widths: Sequence[int]) -> Tensor:
        """As `emit`, by looking at values, where that left rows unsure: `[rows]` int64. Waits for the device."""
        batch = self._rule_batch(False) if self._rules else None
        return self._emit(logits, rows, tree, widths, batch, False).tokens

    def learn_labels(self, logits: Tensor, widths: Sequence[int]) -> None:
        """Take in the labels' probabilities where they are asked for. logits: the target's own, as in `emit`."""
        starts = _starts(widths)
        for b, state in self._asking.items():
            labels = state.label_tree
            if labels is not None:
                nodes = self._trees[b]
                own = logits[starts[b] : starts[b] + len(nodes) + 1]
                state.choice_probabilities = labels.probabilities(own, nodes)

    def _emit(
        self,
        logits: Tensor,
        rows: Flattened,
        tree: CandidateTree,
        widths: Sequence[int],
        batch: RuleBatch | None,
        fixed: bool,
    ) -> Emitted:
        changed = self._rules.keys() | self._grammars.keys()
        emitted = rows.positions + 1
        if not changed:
            return Emitted(self._choose(logits, rows.request, emitted, fixed))
        # Which row is whose the host knows: rows are chosen without asking the device.
        owner = np.repeat(np.arange(len(widths)), np.asarray(widths) + 1)
        mine = np.isin(owner, list(changed))
        selected = np.flatnonzero(mine)
        index = upload(selected, self._device)
        processed = logits.index_select(0, index).float()
        if self._grammars:
            self._apply_grammars(processed, selected, widths)
        unsure = None
        if batch is not None:
            ruled = np.flatnonzero(np.isin(owner[selected], batch.members))
            paths = _paths(rows, tree, owner).select(selected[ruled])
            if ruled.shape[0] == selected.shape[0]:
                batch.apply(processed, paths)
            else:
                at = upload(ruled, self._device)
                processed[at] = batch.apply(processed[at], paths)
            if batch.unsure is not None:
                unsure = torch.zeros_like(emitted, dtype=torch.bool)
                unsure.index_copy_(0, upload(selected[ruled], self._device), batch.unsure)
        tokens = self._choose(processed, rows.request[index], emitted[index], fixed)
        if selected.shape[0] == owner.shape[0]:
            return Emitted(tokens, unsure)
        others = upload(np.flatnonzero(~mine), self._device)
        out = torch.empty_like(emitted).index_copy_(0, index, tokens)
        rest = self._choose(logits.index_select(0, others), rows.request[others], emitted[others], fixed)
        return Emitted(out.index_copy_(0, others, rest), unsure)

    def _choose(self, logits: Tensor, request: Tensor, emitted: Tensor, fixed: bool) -> Tensor:
        if self.temperatures is None:
            return choose_tokens(logits, None, self.seeds, emitted)
        return choose_tokens(logits, self.temperatures[request], self.seeds[request], emitted, fixed=fixed)

    def _rule_batch(self, fixed: bool) -> RuleBatch:
        rules = list(self._rules.values())
        return RuleBatch(rules, list(self._rules), self._contexts, self._device, fixed=fixed)

    def _marked(self, requests: Iterable[int]) -> Tensor:
        marks = torch.zeros(self.seeds.shape[0], dtype=torch.bool, device=self._device)
        return marks.index_fill_(0, upload(list(requests), self._device), True)

    def _least(self, b: int, nodes: Nodes) -> int:
        if self._asking[b].label_tree is not None:
            return len(nodes)
        return sum(mass >= 1 for mass in nodes.masses)

    def _apply_grammars(self, logits: Tensor, selected: Whole, widths: Sequence[int]) -> None:
        """Mask what grammars forbid after every row, in place. The walks are the host's, while a device computes."""
        words = -(-logits.shape[1] // 32)
        total = sum(widths[b] + 1 for b in self._grammars)
        mask = np.zeros((total, words), dtype=np.int32)
        starts = _starts(widths)
        place, at = 0, []
        for b, grammar in self._grammars.items():
            width = widths[b]
            nodes = self._trees[b]
            shown = Nodes(nodes.tokens[:width], nodes.parents[:width], nodes.masses[:width])
            grammar.fill(shown, mask[place : place + width + 1])
            at.append(starts[b] + np.arange(width + 1))
            place += width + 1
        if total == logits.shape[0]:
            apply_bits(logits, mask)
        else:
            where = upload(np.searchsorted(selected, np.concatenate(at)), self._device)
            masked = logits[where]
            apply_bits(masked, mask)
            logits[where] = masked


def _starts(widths: Sequence[int]) -> Whole:
    """Row of each root."""
    counts = np.asarray(widths, dtype=np.int64) + 1
    return counts.cumsum() - counts


def _paths(rows: Flattened, tree: CandidateTree, owner: Whole) -> Paths:
    """Where every row stands: its path is its ancestors and itself, without the root. owner: `[rows]` on the host."""
    request, width = rows.request, tree.max_nodes
    within = torch.arange(request.shape[0], device=request.device) - rows.starts[request]
    mask = rows.mask.flatten(0, 1).index_select(0, request * (width + 1) + within)
    depth = mask.sum(dim=1) - 1
    back = depth[:, None] - tree.depths[request]
    return Paths(owner, rows.positions + 1, depth, mask[:, 1:], tree.tokens[request], back)
