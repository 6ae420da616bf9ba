"""What a request asks of the target's logits before a token is chosen: bans, bias, penalties, filters.

Batched over rows of any requests, each a node of a tree: what depends on the output so far is counted along the
node's own path. The order is vLLM's: allowed tokens, bad words, min_tokens, logit bias, penalties, then what looks at
the distribution at the request's temperature: min-p, top-k, top-p. It chooses no token, see `sampling.keyed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.request import SamplingParams
from cast_ray.trees.pack import DraftScores

NEVER = float("-inf")
# A nucleus is looked for among so many tokens first: sorting a whole vocabulary costs far more.
NUCLEUS_FIRST = 512


@dataclass(frozen=True)
class Paths:
    """Where n rows stand: each row is a node, its context the request's committed tokens and its own path.

    request: `[n]` int64, index of the row's request. emitted: `[n]` int64, place of the token that the row emits in its
    request, prompt included. depth: `[n]` int64, path tokens behind the root; 0 is the root itself.
    rows, tokens, back: `[m]` int64: row `rows[i]` has `tokens[i]` on its path, `back[i]` tokens before its end.
    """

    request: Tensor
    emitted: Tensor
    depth: Tensor
    rows: Tensor
    tokens: Tensor
    back: Tensor

    def select(self, keep: Tensor) -> Paths:
        """The paths of the rows `keep` `[k]` int64, ascending."""
        place = torch.full_like(self.request, -1)
        place[keep] = torch.arange(keep.shape[0], device=keep.device)
        held = place[self.rows]
        inside = held >= 0
        return Paths(
            self.request[keep],
            self.emitted[keep],
            self.depth[keep],
            held[inside],
            self.tokens[inside],
            self.back[inside],
        )


class Counts:
    """How often one request's tokens came, kept up to date as they are committed: `[vocab]` float32 each.

    output: times in the output. prompt: 1 where the prompt has the token; None without a repetition penalty.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(vocab_size, device=device)
        self.prompt: Tensor | None = None
        if params.repetition_penalty != 1:
            self.prompt = torch.zeros(vocab_size, device=device)
            self.prompt[torch.tensor(prompt, device=device)] = 1

    def add(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        index = torch.tensor(tokens, dtype=torch.int64, device=self.output.device)
        self.output.index_put_((index,), self.output.new_ones(()), accumulate=True)


@dataclass
class Rules:
    """What one request asks for, and what it is counted by.

    bad_words: token sequences that may not come to stand in the context. stops: the tokens that min_tokens bans.
    counts: None without penalties.
    """

    params: SamplingParams
    num_prompt: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    stops: tuple[int, ...] = ()
    allowed: Tensor | None = None
    counts: Counts | None = None
    vocab_size: int = 0
    _draft_bias: Tensor | None = None

    def draft_bias(self, device: torch.device) -> Tensor | None:
        """What to add to a drafter's log probabilities: `[vocab]` float32; None where it is nothing."""
        if self._draft_bias is None and (self.allowed is not None or self.params.logit_bias):
            bias = torch.zeros(self.vocab_size, device=device)
            if self.allowed is not None:
                bias.masked_fill_(~self.allowed, NEVER)
            for token, value in self.params.logit_bias.items():
                bias[token] += value / (self.params.temperature or 1.0)
            self._draft_bias = bias
        return self._draft_bias

    @property
    def memory(self) -> int:
        """Context tokens that bad words look back at."""
        return max((len(word) - 1 for word in self.bad_words), default=0)


def make_rules(
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    bad_words: Sequence[Sequence[int]] = (),
    stops: Sequence[int] = (),
    vocab_size: int,
    device: torch.device,
) -> Rules | None:
    """The rules of a request, None when it asks for nothing that changes logits."""
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    stops = tuple(stops) if params.min_tokens else ()
    asked = penalised or params.logit_bias or bad_words or params.allowed_token_ids or stops or params.filtered
    if not asked:
        return None
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        allowed[torch.tensor(params.allowed_token_ids, device=device)] = True
    counts = Counts(params, prompt, vocab_size, device) if penalised else None
    words = tuple(tuple(word) for word in bad_words)
    return Rules(params, len(prompt), words, stops, allowed, counts, vocab_size)


class RuleBatch:
    """The rules of a round's requests as tensors. rules: of those that have some; `requests` says whose they are.

    contexts: the committed tokens of each, of which bad words look at the last few.
    """

    def __init__(
        self, rules: Sequence[Rules], requests: Sequence[int], contexts: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._device = device
        self._rules = rules
        self._requests = requests
        self._owner = torch.tensor(requests, device=device)
        self._allowed = self._those(lambda r: r.allowed is not None)
        self._penalised = self._those(lambda r: r.counts is not None)
        self._filtered = self._those(lambda r: r.params.filtered)
        self._bias = self._pairs([list(r.params.logit_bias.items()) for r in rules])
        self._held_back = self._pairs([[(token, 0.0) for token in r.stops] for r in rules])
        self._gather_words(contexts)

    def members(self, batch: int) -> Tensor:
        """Which of `batch` requests have rules: `[batch]` bool."""
        return torch.zeros(batch, dtype=torch.bool, device=self._device).index_fill_(0, self._owner, True)

    def shape(self, scores: DraftScores, positions: Tensor) -> DraftScores:
        """A drafter's scores with bans and bias that do not depend on the path: what cannot be emitted has no mass.

        positions: `[B]` int64 of the roots; the first drafted token is the one behind.
        """
        logprobs, depths = scores.logprobs.clone(), torch.arange(scores.logprobs.shape[1], device=self._device)
        for rules, b in zip(self._rules, self._requests, strict=True):
            tokens, bias = scores.token_ids[b], rules.draft_bias(self._device)
            shift = torch.zeros_like(logprobs[b]) if bias is None else bias[tokens]
            if rules.stops:
                early = positions[b] + 1 + depths < rules.num_prompt + rules.params.min_tokens
                stops = torch.isin(tokens, torch.tensor(rules.stops, device=self._device))
                shift = shift.masked_fill(early[:, None] & stops, NEVER)
            elif bias is None:
                continue
            # The candidates' shares of all mass, their own as changed and the rest's as it was.
            held = logprobs[b].exp()
            moved = (logprobs[b] + shift).exp()
            rest = (1 - held.sum(dim=1, keepdim=True)).clamp(min=1e-9)
            logprobs[b] = (moved / (moved.sum(dim=1, keepdim=True) + rest)).log()
        return DraftScores(logprobs, scores.token_ids, scores.pairwise)

    def apply(self, logits: Tensor, paths: Paths) -> Tensor:
        """Process `logits` `[n, vocab]` float32 in place; every row belongs to a request with rules.

        Where bad words and min_tokens would leave a row nothing, they do not bind it.
        """
        # From the request's number to its place among those with rules.
        place = torch.searchsorted(self._owner, paths.request)
        self._mask_allowed(logits, place)
        self._ban(logits, paths, place)
        if self._bias is not None:
            rows, at = _matches(place, self._bias[0])
            logits.index_put_((rows, self._bias[1][at]), self._bias[2][at], accumulate=True)
        self._penalise(logits, paths, place)
        if self._filtered:
            self._filter(logits, place)
        return logits

    def _those(self, asks: Callable[[Rules], bool]) -> list[int]:
        return [i for i, rules in enumerate(self._rules) if asks(rules)]

    def _pairs(self, items: list[list[tuple[int, float]]]) -> tuple[Tensor, Tensor, Tensor] | None:
        """(place of the request, token, value) of all; None when there is none."""
        flat = [(place, token, value) for place, pairs in enumerate(items) for token, value in pairs]
        if not flat:
            return None
        places, tokens, values = zip(*flat, strict=True)
        device = self._device
        return (
            torch.tensor(places, device=device),
            torch.tensor(tokens, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )

    def _values(self, name: str, those: list[int]) -> Tensor:
        return torch.tensor([float(getattr(self._rules[i].params, name)) for i in those], device=self._device)

    def _rows_of(self, place: Tensor, those: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of the requests `those`, and for each its request's index among them."""
        index = torch.full((len(self._rules),), -1, dtype=torch.int64, device=self._device)
        index[torch.tensor(those, device=self._device)] = torch.arange(len(those), device=self._device)
        found = index[place]
        rows = (found >= 0).nonzero()[:, 0]
        return rows, found[rows]

    def _mask_allowed(self, logits: Tensor, place: Tensor) -> None:
        if self._allowed:
            rows, which = self._rows_of(place, self._allowed)
            allowed = torch.stack([a for i in self._allowed if (a := self._rules[i].allowed) is not None])
            logits[rows] = logits[rows].masked_fill(~allowed[which], NEVER)

    def _gather_words(self, contexts: Sequence[Sequence[int]]) -> None:
        """Bad words as a table `[words, memory]` of what comes before the last token, nearest first; -1 is anything."""
        words = [(place, word) for place, rules in enumerate(self._rules) for word in rules.bad_words]
        self._word_owner: Tensor | None = None
        if not words:
            return
        memory = max(rules.memory for rules in self._rules)
        self._word_owner = torch.tensor([place for place, _ in words], device=self._device)
        self._word_last = torch.tensor([word[-1] for _, word in words], device=self._device)
        # Nearest first, as `recent` has the context.
        before = [[*word[-2::-1], *[-1] * (memory - len(word) + 1)] for _, word in words]
        self._word_before = torch.tensor(before, dtype=torch.int64, device=self._device).view(len(words), memory)
        tails = [list(context[: -memory - 1 : -1]) if memory else [] for context in contexts]
        padded = [tail + [-2] * (memory - len(tail)) for tail in tails]
        self._tails = torch.tensor(padded, dtype=torch.int64, device=self._device).view(len(contexts), memory)

    def _ban(self, logits: Tensor, paths: Paths, place: Tensor) -> None:
        rows, tokens = [], []
        if self._word_owner is not None:
            row, word = _matches(place, self._word_owner)
            recent = self._recent(paths, place)[row]
            before = self._word_before[word]
            hit = ((recent == before) | (before == -1)).all(dim=1)
            rows.append(row[hit])
            tokens.append(self._word_last[word[hit]])
        if self._held_back is not None:
            row, stop = _matches(place, self._held_back[0])
            least = torch.tensor([r.num_prompt + r.params.min_tokens for r in self._rules], device=self._device)
            early = paths.emitted[row] < least[place[row]]
            rows.append(row[early])
            tokens.append(self._held_back[1][stop[early]])
        if not rows:
            return
        at = (torch.cat(rows), torch.cat(tokens))
        before_ban = logits[at]
        logits.index_put_(at, logits.new_tensor(NEVER))
        emptied = logits.amax(dim=1) == NEVER
        logits.index_put_(at, torch.where(emptied[at[0]], before_ban, NEVER))

    def _recent(self, paths: Paths, place: Tensor) -> Tensor:
        """The last tokens of each row's context, nearest first: `[n, memory]`."""
        memory = self._tails.shape[1]
        columns = torch.arange(memory, device=self._device)
        behind = columns - paths.depth[:, None]
        recent = self._tails[place].gather(1, behind.clamp(min=0))
        near = paths.back < memory
        recent[paths.rows[near], paths.back[near]] = paths.tokens[near]
        return recent

    def _penalise(self, logits: Tensor, paths: Paths, place: Tensor) -> None:
        if not self._penalised:
            return
        rows, which = self._rows_of(place, self._penalised)
        counts = [c for i in self._penalised if (c := self._rules[i].counts) is not None]
        inside = torch.full_like(place, -1)
        inside[rows] = torch.arange(rows.shape[0], device=self._device)
        held = inside[paths.rows]
        on = held >= 0
        # Every row's own counts: what is committed, and its path.
        times = torch.stack([c.output for c in counts])[which]
        times.index_put_((held[on], paths.tokens[on]), times.new_ones(()), accumulate=True)
        values = logits[rows]
        if any(c.prompt is not None for c in counts):
            prompts = torch.stack([torch.zeros_like(c.output) if c.prompt is None else c.prompt for c in counts])
            penalty = self._values("repetition_penalty", self._penalised)[which][:, None]
            repeated = (prompts[which] > 0) | (times > 0)
            values = torch.where(repeated, torch.where(values > 0, values / penalty, values * penalty), values)
        values -= self._values("frequency_penalty", self._penalised)[which][:, None] * times
        values -= self._values("presence_penalty", self._penalised)[which][:, None] * (times > 0)
        logits[rows] = values

    def _filter(self, logits: Tensor, place: Tensor) -> None:
        """Mask what min-p, top-k and top-p leave out. A token as likely as the last one kept is kept."""
        rows, which = self._rows_of(place, self._filtered)
        params = [self._rules[i].params for i in self._filtered]
        values = logits[rows] / self._values("temperature", self._filtered)[which][:, None]
        vocab = values.shape[1]
        if any(p.min_p > 0 for p in params):
            least = values.amax(dim=1, keepdim=True) + self._values("min_p", self._filtered).log()[which][:, None]
            values = values.masked_fill(values < least, NEVER)
        if any(p.top_k for p in params):
            most = torch.tensor([p.top_k or vocab for p in params], device=self._device).clamp(max=vocab)[which][
                :, None
            ]
            widest = max(min(p.top_k, vocab) for p in params)
            kth = values.topk(widest, dim=1).values.gather(1, most.clamp(max=widest) - 1)
            values = values.masked_fill((values < kth) & (most < vocab), NEVER)
        if any(p.top_p < 1 for p in params):
            share = self._values("top_p", self._filtered)[which][:, None]
            values = values.masked_fill(values < nucleus_threshold(values, share), NEVER)
        logits[rows] = logits[rows].masked_fill(values == NEVER, NEVER)


def nucleus_threshold(values: Tensor, share: Tensor) -> Tensor:
    """The score of the last token of each row's nucleus: `[n, 1]`, for `values` `[n, vocab]`, `share` `[n, 1]`.

    The nucleus is the smallest set of likeliest tokens whose probabilities reach `share`. A share of 1 is everything.
    """
    vocab = values.shape[1]
    first = min(NUCLEUS_FIRST, vocab)
    total = values.logsumexp(dim=1, keepdim=True)
    threshold, found = _nucleus_end(values.topk(first, dim=1).values, total, share)
    missing = (~found & (share < 1)).nonzero()[:, 0] if first < vocab else None
    if missing is not None and missing.shape[0]:
        whole = values[missing].sort(dim=1, descending=True).values
        threshold[missing], _ = _nucleus_end(whole, total[missing], share[missing])
    return threshold.masked_fill_(share >= 1, NEVER)


def _nucleus_end(ranked: Tensor, total: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sum of sorted scores' probabilities reaches `share`, as a score, and whether it does: `[n, 1]` each."""
    before = (ranked - total).exp().double().cumsum(dim=1)
    short = (before < share).sum(dim=1, keepdim=True)
    return ranked.gather(1, short.clamp(max=ranked.shape[1] - 1)), short < ranked.shape[1]


def _matches(place: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (row, item) of one request: `[k]` int64 each."""
    rows, items = (place[:, None] == owner).nonzero().unbind(1)
    return rows, items
