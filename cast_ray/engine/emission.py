"""How the requests of a round emit: their seeds and temperatures, and for those that ask, rules, grammars and reports.

Made anew each round from the requests' own state. A round in which nobody asks for anything special pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from cast_ray.engine.sequence import Sequence as Request
from cast_ray.models.flatten import Flattened
from cast_ray.models.transfer import upload
from cast_ray.request import TokenLogprob
from cast_ray.sampling.emitting import Emitting
from cast_ray.sampling.grammar import Grammar, apply_bits
from cast_ray.sampling.keyed import choose_tokens
from cast_ray.sampling.processors import Paths, RuleBatch, Rules
from cast_ray.trees.accept import Accepted
from cast_ray.trees.edit import Nodes, read, replace, trunk
from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree


class Emission:
    """See the module.

    seeds: `[B]` int64. temperatures: `[B]` float32, None when all requests are greedy.
    draftable: whether a drafter can help any of them. foreign: `[B]` bool, requests whose candidates are not a
    drafter's alone and say nothing of it; None for none.
    """

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device) -> None:
        self.seeds = upload([r.seed for r in requests], device)
        self.temperatures: Tensor | None = None
        if any(r.params.temperature for r in requests):
            self.temperatures = upload([float(r.params.temperature) for r in requests], device, torch.float32)
        self._device = device
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
        self._batch: RuleBatch | None = None
        if self._rules:
            contexts = [requests[b].tokens for b in self._rules]
            self._batch = RuleBatch(list(self._rules.values()), list(self._rules), contexts, device)

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
        wanted[torch.tensor(list(least), device=self._device)] = torch.tensor(list(least.values()), device=self._device)
        return wanted if chosen is None else torch.maximum(chosen.to(self._device), wanted)

    def emit(self, logits: Tensor, rows: Flattened, tree: CandidateTree, widths: Sequence[int]) -> Tensor:
        """The target's own token after every row, `[rows]` int64; each belongs to the position behind its row's.

        logits: `[rows, vocab]`, left as they are. tree: the verified slice; widths: nodes of each request.
        """
        changed = self._changed()
        if changed is None and self.temperatures is None:
            return choose_tokens(logits, None, self.seeds, rows.positions)
        request, emitted = rows.request, rows.positions + 1
        if changed is None:
            return self._choose(logits, request, emitted)
        mine = changed[request]
        selected = mine.nonzero()[:, 0]
        processed = logits[selected].float()
        if self._grammars:
            self._apply_grammars(processed, selected, rows, widths)
        if self._batch is not None:
            paths = _paths(rows, tree)
            ruled = self._batch.members(len(widths))[request[selected]].nonzero()[:, 0]
            if ruled.shape[0] == selected.shape[0]:
                self._batch.apply(processed, paths.select(selected))
            else:
                processed[ruled] = self._batch.apply(processed[ruled], paths.select(selected[ruled]))
        tokens = self._choose(processed, request[selected], emitted[selected])
        if selected.shape[0] == request.shape[0]:
            return tokens
        others = (~mine).nonzero()[:, 0]
        out = torch.empty_like(request)
        out[selected] = tokens
        out[others] = self._choose(logits[others], request[others], emitted[others])
        return out

    def report(self, logits: Tensor, rows: Flattened, accepted: Accepted, committed: Sequence[Sequence[int]]) -> None:
        """Tell the requests what they asked to know of this round. logits: the target's own."""
        for b, state in self._asking.items():
            labels = state.label_tree
            if labels is not None:
                start = int(rows.starts[b])
                nodes = self._trees[b]
                own = logits[start : start + len(nodes) + 1]
                state.choice_probabilities = labels.probabilities(own, nodes)
        asking = [b for b, state in self._asking.items() if state.logprobs is not None and committed[b]]
        if not asking:
            return
        at = torch.tensor([b for b in asking for _ in committed[b]], device=self._device)
        steps = torch.tensor([i for b in asking for i in range(len(committed[b]))], device=self._device)
        tokens = [token for b in asking for token in committed[b]]
        top = max(self._asking[b].params.logprobs or 0 for b in asking)
        found = iter(token_logprobs(logits[rows.starts[at] + accepted.path[at, steps]], tokens, top))
        for b in asking:
            state = self._asking[b]
            assert state.logprobs is not None
            state.logprobs += [_cut(next(found), state.params.logprobs or 0) for _ in committed[b]]

    def _choose(self, logits: Tensor, request: Tensor, emitted: Tensor) -> Tensor:
        if self.temperatures is None:
            return choose_tokens(logits, None, self.seeds, emitted)
        return choose_tokens(logits, self.temperatures[request], self.seeds[request], emitted)

    def _changed(self) -> Tensor | None:
        """Requests whose logits are not the target's own: `[B]` bool; None for none."""
        those = self._rules.keys() | self._grammars.keys()
        return self._marked(those) if those else None

    def _marked(self, requests: Iterable[int]) -> Tensor:
        marks = torch.zeros(self.seeds.shape[0], dtype=torch.bool, device=self._device)
        return marks.index_fill_(0, torch.tensor(list(requests), device=self._device), True)

    def _least(self, b: int, nodes: Nodes) -> int:
        if self._asking[b].label_tree is not None:
            return len(nodes)
        return sum(mass >= 1 for mass in nodes.masses)

    def _apply_grammars(self, logits: Tensor, selected: Tensor, rows: Flattened, widths: Sequence[int]) -> None:
        """Mask what grammars forbid after every row, in place. The walks are the host's, while a device computes."""
        words = -(-logits.shape[1] // 32)
        total = sum(widths[b] + 1 for b in self._grammars)
        mask = np.zeros((total, words), dtype=np.int32)
        place, at = 0, []
        for b, grammar in self._grammars.items():
            width = widths[b]
            nodes = self._trees[b]
            shown = Nodes(nodes.tokens[:width], nodes.parents[:width], nodes.masses[:width])
            grammar.fill(shown, mask[place : place + width + 1])
            at.append(rows.starts[b] + torch.arange(width + 1, device=self._device))
            place += width + 1
        where = torch.searchsorted(selected, torch.cat(at))
        if total == logits.shape[0]:
            apply_bits(logits, mask)
        else:
            masked = logits[where]
            apply_bits(masked, mask)
            logits[where] = masked


def score_prompt(request: Request, start: int, logits: Tensor) -> None:
    """Report the log probabilities of prompt tokens. logits: `[n, vocab]` behind the tokens from `start` on."""
    state = request.emitting
    assert state is not None
    assert state.prompt_logprobs is not None
    # Computed before, when the request was preempted; or the output's, behind the prompt.
    first, last = len(state.prompt_logprobs), min(start + 1 + logits.shape[0], request.num_prompt)
    if first < last:
        rows = logits[first - start - 1 : last - start - 1]
        tokens = request.tokens[first:last]
        state.prompt_logprobs += token_logprobs(rows, tokens, state.params.prompt_logprobs or 0)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log probabilities of `tokens` (n) under `logits` `[n, vocab]`, with the `top` likeliest of each row."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    best = logprobs.topk(top, dim=1)
    values: list[list[float]] = torch.cat([own, best.values], dim=1).tolist()
    ids: list[list[int]] = best.indices.tolist()
    return [
        TokenLogprob(token, row[0], tuple(zip(likeliest, row[1:], strict=True)))
        for token, row, likeliest in zip(tokens, values, ids, strict=True)
    ]


def _cut(found: TokenLogprob, top: int) -> TokenLogprob:
    return TokenLogprob(found.token_id, found.logprob, found.top[:top])


def _paths(rows: Flattened, tree: CandidateTree) -> Paths:
    """Where every row stands: its path is its ancestors and itself, without the root."""
    mask = rows.mask.flatten(0, 1) if rows.real is None else rows.mask[rows.real]
    depth = mask.sum(dim=1) - 1
    row, node = mask[:, 1:].nonzero().unbind(1)
    request = rows.request[row]
    back = depth[row] - tree.depths[request, node]
    return Paths(rows.request, rows.positions + 1, depth, row, tree.tokens[request, node], back)
