"""What a request asks of the target's logits before a token is chosen: bans, bias, penalties, filters.

Batched over rows of any requests, each a node of a tree: what depends on the output so far is counted along the
node's own path. The order is vLLM's: allowed tokens, bad words, min_tokens, logit bias, penalties, then what looks at
the distribution at the request's temperature: min-p, top-k, top-p. It chooses no token, see `sampling.keyed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from cast_ray.sampling.rules import NEVER, Rules
from cast_ray.transfer import upload
from cast_ray.trees.pack import DraftScores

Whole = npt.NDArray[np.int64]
# A nucleus is looked for among so many tokens first: sorting a whole vocabulary costs far more. Where the host would
# have to wait to know whether it was found, among more of them.
NUCLEUS_FIRST, NUCLEUS_FIXED = 512, 4096


@dataclass(frozen=True)
class Paths:
    """Where n rows stand: each row is a node, its context the request's committed tokens and its own path.

    request: `[n]` int64 on the host, index of the row's request. emitted: `[n]` int64, place of the token that the row
    emits in its request, prompt included. depth: `[n]` int64, path tokens behind the root; 0 is the root itself.
    held: `[n, W]` bool, which nodes of its request's tree are on a row's path; tokens, back: `[n, W]` int64 of all
    nodes, the second the path tokens behind a node where it is held.
    """

    request: Whole
    emitted: Tensor
    depth: Tensor
    held: Tensor
    tokens: Tensor
    back: Tensor

    def select(self, keep: Whole) -> Paths:
        """The paths of the rows `keep` `[k]` int64 on the host."""
        if keep.shape[0] == self.request.shape[0]:
            return self
        parts = (self.emitted, self.depth, self.held, self.tokens, self.back)
        index = upload(keep, self.emitted.device)
        return Paths(self.request[keep], *(part.index_select(0, index) for part in parts))


class RuleBatch:
    """The rules of a round's requests as tensors. rules: of those that have some; `requests` says whose they are.

    contexts: the committed tokens of each, of which bad words look at the last few. fixed: whether all shapes are to be
    such that no value decides them, so that nothing waits for the device.
    unsure: `[n]` bool, rows of the last `apply` whose nucleus is wider than what was looked at and was cut there, so
    that they have to be done again without `fixed`; None for none.
    """

    def __init__(
        self,
        rules: Sequence[Rules],
        requests: Sequence[int],
        contexts: Sequence[Sequence[int]],
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self.unsure: Tensor | None = None
        self._device = device
        self._fixed = fixed
        self._rules = rules
        self._owner = np.asarray(requests, dtype=np.int64)
        self._allowed = self._those(lambda r: r.allowed is not None)
        self._penalised = self._those(lambda r: r.counts is not None)
        self._filtered = self._those(lambda r: r.params.filtered)
        self._bias = self._pairs([list(r.params.logit_bias.items()) for r in rules])
        self._held_back = self._pairs([[(token, 0.0) for token in r.stops] for r in rules])
        self._gather_words(contexts)

    @property
    def members(self) -> Whole:
        """The requests that have rules, ascending."""
        return self._owner

    def shape(self, scores: DraftScores, positions: Tensor) -> DraftScores:
        """A drafter's scores with bans and bias that do not depend on the path: what cannot be emitted has no mass.

        positions: `[B]` int64 of the roots; the first drafted token is the one behind.
        """
        logprobs, depths = scores.logprobs.clone(), torch.arange(scores.logprobs.shape[1], device=self._device)
        for rules, b in zip(self._rules, self._owner.tolist(), strict=True):
            tokens, bias = scores.token_ids[b], rules.draft_bias(self._device)
            shift = torch.zeros_like(logprobs[b]) if bias is None else bias[tokens]
            if rules.stops:
                early = positions[b] + 1 + depths < rules.first_free
                stops = torch.isin(tokens, upload(rules.stops, self._device))
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
        self.unsure = None
        # From the request's number to its place among those with rules.
        place = np.searchsorted(self._owner, paths.request)
        self._mask_allowed(logits, place)
        self._ban(logits, paths, place)
        if self._bias is not None:
            rows, at = self._matches(place, self._bias.owner)
            logits.index_put_((rows, self._bias.tokens[at]), self._bias.values[at], accumulate=True)
        self._penalise(logits, paths, place)
        self._filter(logits, place)
        return logits

    def _those(self, asks: Callable[[Rules], bool]) -> list[int]:
        return [i for i, rules in enumerate(self._rules) if asks(rules)]

    def _pairs(self, items: list[list[tuple[int, float]]]) -> _Pairs | None:
        """Tokens with values of all requests together; None when there is none."""
        flat = [(place, token, value) for place, pairs in enumerate(items) for token, value in pairs]
        if not flat:
            return None
        places, tokens, values = zip(*flat, strict=True)
        device = self._device
        return _Pairs(np.asarray(places, dtype=np.int64), upload(tokens, device), upload(values, device, torch.float32))

    def _matches(self, place: Whole, owner: Whole) -> tuple[Tensor, Tensor]:
        """All pairs (row, item) of one request: `[k]` int64 each. owner: the request of each item."""
        rows, items = np.nonzero(place[:, None] == owner)
        return upload(rows, self._device), upload(items, self._device)

    def _rows_of(self, place: Whole, those: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of the requests `those`, and for each its request's index among them."""
        index = np.full(len(self._rules), -1, dtype=np.int64)
        index[those] = np.arange(len(those))
        found = index[place]
        rows = np.flatnonzero(found >= 0)
        return upload(rows, self._device), upload(found[rows], self._device)

    def _mask_allowed(self, logits: Tensor, place: Whole) -> None:
        if self._allowed:
            rows, which = self._rows_of(place, self._allowed)
            allowed = torch.stack([a for i in self._allowed if (a := self._rules[i].allowed) is not None])
            logits[rows] = logits[rows].masked_fill(~allowed[which], NEVER)

    def _gather_words(self, contexts: Sequence[Sequence[int]]) -> None:
        """Bad words as a table `[words, memory]` of what comes before the last token, nearest first; -1 is anything."""
        words = [(place, word) for place, rules in enumerate(self._rules) for word in rules.bad_words]
        self._word_owner: Whole | None = None
        if not words:
            return
        memory = max(rules.memory for rules in self._rules)
        self._word_owner = np.asarray([place for place, _ in words], dtype=np.int64)
        self._word_last = upload([word[-1] for _, word in words], self._device)
        # Nearest first, as `recent` has the context.
        before = [[*word[-2::-1], *[-1] * (memory - len(word) + 1)] for _, word in words]
        self._word_before = upload(np.asarray(before, dtype=np.int64).reshape(len(words), memory), self._device)
        tails = [list(context[: -memory - 1 : -1]) if memory else [] for context in contexts]
        padded = [tail + [-2] * (memory - len(tail)) for tail in tails]
        self._tails = upload(np.asarray(padded, dtype=np.int64).reshape(len(contexts), memory), self._device)

    def _ban(self, logits: Tensor, paths: Paths, place: Whole) -> None:
        rows, tokens, binds = [], [], []
        if self._word_owner is not None:
            row, word = self._matches(place, self._word_owner)
            recent = self._recent(paths, upload(place, self._device))[row]
            before = self._word_before[word]
            rows.append(row)
            tokens.append(self._word_last[word])
            binds.append(((recent == before) | (before == -1)).all(dim=1))
        if self._held_back is not None:
            row, stop = self._matches(place, self._held_back.owner)
            least = upload(np.asarray([r.first_free for r in self._rules])[place], self._device)
            rows.append(row)
            tokens.append(self._held_back.tokens[stop])
            binds.append(paths.emitted[row] < least[row])
        if not rows:
            return
        at = torch.cat(rows), torch.cat(tokens)
        before_ban = logits[at]
        # Several bans may meet at one token, some of which bind: the least of them stands.
        banned = torch.where(torch.cat(binds), NEVER, float("inf"))
        logits.view(-1).scatter_reduce_(0, at[0] * logits.shape[1] + at[1], banned, "amin")
        emptied = (logits.amax(dim=1) == NEVER)[at[0]]
        logits.index_put_(at, torch.where(emptied, before_ban, logits[at]))

    def _recent(self, paths: Paths, place: Tensor) -> Tensor:
        """The last tokens of each row's context, nearest first: `[n, memory]`."""
        memory = self._tails.shape[1]
        columns = torch.arange(memory, device=self._device)
        behind = columns - paths.depth[:, None]
        recent = self._tails[place].gather(1, behind.clamp(min=0)) if memory else self._tails[place]
        # What is further back, or not on the path, goes into a column of its own, which is dropped.
        column = torch.where(paths.held & (paths.back < memory), paths.back, memory)
        return pad(recent, (0, 1)).scatter_(1, column, paths.tokens)[:, :memory]

    def _penalise(self, logits: Tensor, paths: Paths, place: Whole) -> None:
        if not self._penalised:
            return
        rows, which = self._rows_of(place, self._penalised)
        counts = [c for i in self._penalised if (c := self._rules[i].counts) is not None]
        # Every row's own counts: what is committed, and its path.
        times = torch.stack([c.output for c in counts])[which]
        times.scatter_add_(1, paths.tokens[rows], paths.held[rows].to(times.dtype))
        values = logits[rows]
        if any(c.prompt is not None for c in counts):
            prompts = torch.stack([torch.zeros_like(c.output) if c.prompt is None else c.prompt for c in counts])
            penalty = self._values("repetition_penalty", self._penalised)[which]
            repeated = (prompts[which] > 0) | (times > 0)
            values = torch.where(repeated, torch.where(values > 0, values / penalty, values * penalty), values)
        values -= self._values("frequency_penalty", self._penalised)[which] * times
        values -= self._values("presence_penalty", self._penalised)[which] * (times > 0)
        logits[rows] = values

    def _filter(self, logits: Tensor, place: Whole) -> None:
        """Mask what min-p, top-k and top-p leave out. A token as likely as the last one kept is kept."""
        if not self._filtered:
            return
        rows, which = self._rows_of(place, self._filtered)
        params = [self._rules[i].params for i in self._filtered]
        values = logits[rows] / self._values("temperature", self._filtered)[which]
        vocab = values.shape[1]
        if any(p.min_p > 0 for p in params):
            least = values.amax(dim=1, keepdim=True) + self._values("min_p", self._filtered).log()[which]
            values = values.masked_fill(values < least, NEVER)
        if any(p.top_k for p in params):
            ranks = [min(p.top_k or vocab, vocab) for p in params]
            most = upload(ranks, self._device)[which][:, None]
            widest = max(min(p.top_k, vocab) for p in params)
            kth = values.topk(widest, dim=1).values.gather(1, most.clamp(max=widest) - 1)
            values = values.masked_fill((values < kth) & (most < vocab), NEVER)
        if any(p.top_p < 1 for p in params):
            share = self._values("top_p", self._filtered)[which]
            least, missing = nucleus_threshold(values, share, fixed=self._fixed)
            values = values.masked_fill(values < least, NEVER)
            if missing is not None:
                self.unsure = torch.zeros_like(logits[:, 0], dtype=torch.bool).index_copy_(0, rows, missing)
        logits[rows] = logits[rows].masked_fill(values == NEVER, NEVER)

    def _values(self, name: str, those: list[int]) -> Tensor:
        """A parameter of the requests `those`, `[k, 1]` float32."""
        values = [float(getattr(self._rules[i].params, name)) for i in those]
        return upload(values, self._device, torch.float32)[:, None]


@dataclass(frozen=True)
class _Pairs:
    """owner: `[k]` on the host, places of requests among those with rules. tokens, values: `[k]` int64 and float32."""

    owner: Whole
    tokens: Tensor
    values: Tensor


def nucleus_threshold(values: Tensor, share: Tensor, *, fixed: bool = False) -> tuple[Tensor, Tensor | None]:
    """The score of the last token of each row's nucleus: `[n, 1]`, for `values` `[n, vocab]`, `share` `[n, 1]`.

    The nucleus is the smallest set of likeliest tokens whose probabilities reach `share`. A share of 1 is everything.
    fixed: nothing waits for the device. Then also which rows' nuclei are wider than what was looked at, `[n]` bool.
    """
    vocab = values.shape[1]
    first = min(NUCLEUS_FIXED if fixed else NUCLEUS_FIRST, vocab)
    total = values.logsumexp(dim=1, keepdim=True)
    threshold, found = _nucleus_end(values.topk(first, dim=1).values, total, share)
    unfound = (~found & (share < 1))[:, 0] if first < vocab else None
    if unfound is not None and not fixed:
        missing = unfound.nonzero()[:, 0]
        if missing.shape[0]:
            whole = values[missing].sort(dim=1, descending=True).values
            threshold[missing], _ = _nucleus_end(whole, total[missing], share[missing])
        unfound = None
    return threshold.masked_fill_(share >= 1, NEVER), unfound


def _nucleus_end(ranked: Tensor, total: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sum of sorted scores' probabilities reaches `share`, as a score, and whether it does: `[n, 1]` each."""
    before = (ranked - total).exp().double().cumsum(dim=1)
    short = (before < share).sum(dim=1, keepdim=True)
    return ranked.gather(1, short.clamp(max=ranked.shape[1] - 1)), short < ranked.shape[1]
