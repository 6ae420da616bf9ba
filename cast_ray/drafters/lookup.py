"""Lookup drafting: what came next where the last tokens stood before, in the prompt, the output or earlier rows.

No network and no training: it works for every target. Its candidates are a tree whose masses `sources` learns from what
the target writes. It only proposes; what is verified, and what is emitted, is decided elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cast_ray.drafters.sources import Array, SourceTrust
from cast_ray.drafters.store import TextStore
from cast_ray.drafters.suffix import LONGEST, Matches, Tokens, Whole
from cast_ray.trees.merge import Offer, heaviest

# How a `drafter` setting asks for it.
NAME = "lookup"
# Source numbers of an Offer, above trees.merge.DRAFTER; the index among the names is one lower.
SOURCES = ("prompt", "output", "rows")
PROMPT, OUTPUT, ROWS = 1, 2, 3
# Deepest candidate, and the most deep a request's text is followed when it repeats itself.
MAX_DEPTH = 64
# Earlier places of one request that are followed, the most trusted first.
PLACES = 8
# Lightest candidate that is offered; what is lighter is not worth its time anywhere.
LEAST_MASS = 0.01
# Tokens of a prompt's end that are kept before a row's output, so that the output's beginning is found by them.
LEAD = 16
# Longest text of a running request that is looked in.
LONGEST_TEXT = 65_536
# Tokens of outputs that wait to be handed to other engines; the oldest outputs give way.
MOST_UNTOLD = 16_384
# A finished output as it travels between engines: its scope, the tokens before it, its own.
Output = tuple[str, tuple[int, ...], tuple[int, ...]]


def split_name(drafter: str | None) -> tuple[str | None, bool]:
    """A `drafter` setting as the block drafter that it names, None for none, and whether to look up besides.

    `lookup` is lookup alone, `NAME+lookup` both.
    """
    if drafter == NAME:
        return None, True
    if drafter is not None and drafter.endswith(f"+{NAME}"):
        return drafter.removesuffix(f"+{NAME}"), True
    return drafter, False


class Writing(Protocol):
    """A running request, as lookup sees it; `engine.sequence.Sequence` is one.

    arrival: a number of its own. row: its place among those that run. tokens: prompt and output, the first
    `num_prompt` being the prompt. lookup_scope: what it shares its output with, None for nothing.
    """

    arrival: int
    row: int
    tokens: list[int]
    num_prompt: int
    lookup_scope: str | None


@dataclass
class _Held:
    """Whose text a row holds, and how much of it."""

    arrival: int = -1
    length: int = 0
    scope: int = 0


class Lookup:
    """See the module. rows: requests that run at once. max_context: their tokens. kept_tokens: see TextStore.

    Each round: `propose`, and behind it `observe` with what the round committed.
    """

    def __init__(self, rows: int, max_context: int, kept_tokens: int) -> None:
        self.store = TextStore(rows, min(max_context, LONGEST_TEXT), kept_tokens)
        self.trust = SourceTrust(len(SOURCES), rows)
        self._held = [_Held() for _ in range(rows)]
        self._untold: deque[Output] = deque()
        self._untold_tokens = 0
        self._offer: Offer | None = None
        self._cells: Whole = np.zeros((0, 0), dtype=np.int64)

    def propose(self, requests: Sequence[Writing], max_nodes: int) -> Offer | None:
        """Candidates behind each request's last token, at most `max_nodes` each; None where nobody has any."""
        self._offer = None
        self._read(requests)
        rows = np.array([r.row for r in requests])
        lengths = np.array([self._held[r.row].length for r in requests])
        scopes = np.array([self._held[r.row].scope for r in requests])
        matches, kept = self.store.find(rows, lengths, scopes)
        if not len(matches.at):
            return None
        starts = self.store.start_of(rows)
        prompt_ends = starts + np.array([r.num_prompt for r in requests])
        # By the token that would come next.
        source = np.where(matches.at + 1 < prompt_ends[matches.query], PROMPT, OUTPUT)
        source[kept] = ROWS
        offer, self._cells = self._grow(matches, source, starts + lengths, rows, max_nodes)
        self._offer = offer if offer.tokens.size else None
        return self._offer

    def observe(self, requests: Sequence[Writing], committed: Sequence[Sequence[int]], ended: Sequence[bool]) -> None:
        """What the round committed: it tells how good the last offer was. Outputs that ended are kept for others."""
        if self._offer is not None:
            self._learn(self._offer, requests, committed)
            self._offer = None
        for request, done in zip(requests, ended, strict=True):
            if done and request.lookup_scope is not None:
                prompt, output = request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
                self.store.keep(self.store.scope(request.lookup_scope), prompt[-LEAD:], output)
                self._note((request.lookup_scope, tuple(prompt[-LEAD:]), tuple(output)))

    def exchange(self, others: Sequence[Output]) -> list[Output]:
        """Take in outputs of other engines, as if written here, and give out those written here since the last call."""
        for scope, lead, output in others:
            self.store.keep(self.store.scope(scope), lead, output)
        told = list(self._untold)
        self._untold.clear()
        self._untold_tokens = 0
        return told

    def report(self) -> dict[str, Any]:
        """Plain values: rows kept, memory when full, and by source how often it was right lately."""
        return {
            "outputs_kept": self.store.outputs,
            "most_bytes": self.store.bytes,
            "sources": self.trust.report(SOURCES),
        }

    def _note(self, output: Output) -> None:
        self._untold.append(output)
        self._untold_tokens += len(output[2])
        while self._untold_tokens > MOST_UNTOLD:
            self._untold_tokens -= len(self._untold.popleft()[2])

    def _read(self, requests: Sequence[Writing]) -> None:
        """Take in what was written since the last round; all of it of a request that is new in its row."""
        pieces = []
        for request in requests:
            held = self._held[request.row]
            if held.arrival != request.arrival:
                self.store.clear(request.row)
                self.trust.forget(request.row)
                scope = request.lookup_scope
                self._held[request.row] = held = _Held(request.arrival, 0, self.store.scope(scope) if scope else 0)
            if held.length < len(request.tokens) <= self.store.own_tokens:
                pieces.append((request.row, held.length, request.tokens[held.length :]))
                held.length = len(request.tokens)
            elif held.length and len(request.tokens) > self.store.own_tokens:
                # Where it stopped being read, nothing more can be said of what comes next.
                self.store.clear(request.row)
                held.length = 0
        self.store.write(pieces)

    def _grow(self, matches: Matches, source: Whole, ends: Whole, rows: Whole, max_nodes: int) -> tuple[Offer, Whole]:
        """The texts behind the matches as one tree a request. ends: `[B]`, positions behind the requests' last tokens.

        Texts that begin alike share their nodes. A node's probability is what its class is worth: by the source and
        length of the longest match behind it, which is a token longer at each depth, and by the share of the matches
        that go on so.
        """
        query, length, strength, source, at = self._strongest(matches, source, rows)
        texts, inside = self._texts(at, source, length, ends[query])
        width = texts.shape[1]
        # A number for every prefix of every text: equal prefixes of one request have equal ones.
        sums = (texts.astype(np.uint64) * _FACTORS[:width]).cumsum(axis=1) + (query.astype(np.uint64) * _SPREAD)[
            :, None
        ]
        entry_text, entry_depth = inside.nonzero()
        order, starts, node = _groups(sums[inside])
        first = order[starts]
        count, batch = len(first), len(rows)
        grid = np.zeros(texts.shape, dtype=np.int64)
        grid[inside] = node
        text, depth = entry_text[first], entry_depth[first]
        request = query[text]
        parent = np.where(depth > 0, grid[text, np.maximum(depth - 1, 0)], count + request)

        entries = entry_text[order]
        weights = np.add.reduceat((strength * length * length)[entries], starts)
        total = np.bincount(parent, weights, count + batch)
        # The longest match behind a node, and its source: the greatest of numbers that hold both.
        reach = np.minimum(length[entries] + entry_depth[order], LONGEST)
        longest, sources = np.divmod(np.maximum.reduceat(reach * 4 + source[entries], starts), 4)
        votes = np.diff(starts, append=len(order))
        cells = self.trust.cell(sources - 1, longest, weights / total[parent], votes)
        share = self.trust.worth(cells, rows[request])
        share /= np.maximum(np.bincount(parent, share, count + batch), 1.0)[parent]
        # A child is lighter than its parent even where it is certain, so that parents come first.
        steps = np.zeros(texts.shape)
        steps[inside] = (np.log(share) - _LIGHTER)[node]
        logs = steps.cumsum(axis=1)[text, depth]

        worth = (logs >= math.log(LEAST_MASS)).nonzero()[0]
        place = np.full(count + batch, 0)
        place[worth] = np.arange(len(worth))
        place[count:] = len(worth) + np.arange(batch)
        offer, (to, of) = heaviest(
            logs[worth],
            request[worth],
            place[parent[worth]],
            texts[text, depth][worth].astype(np.int64) - 1,
            depth[worth] + 1,
            sources[worth],
            batch,
            max_nodes,
        )
        spread = np.zeros(offer.tokens.shape, dtype=np.int64)
        spread[to] = cells[worth][of]
        return offer, spread

    def _strongest(self, matches: Matches, source: Whole, rows: Whole) -> tuple[Whole, Whole, Array, Whole, Whole]:
        """The PLACES most trusted matches of each request, of equals the latest."""
        strength = self.trust.best(source - 1, matches.lengths)
        order = np.lexsort((-matches.at, -strength, matches.query))
        ordered = matches.query[order]
        rank = np.arange(len(order)) - ordered.searchsorted(np.arange(len(rows)))[ordered]
        chosen = order[rank < PLACES]
        return matches.query[chosen], matches.lengths[chosen], strength[chosen], source[chosen], matches.at[chosen]

    def _texts(self, at: Whole, source: Whole, length: Whole, ends: Whole) -> tuple[Tokens, np.ndarray]:
        """What stands behind the matches, `[M, D]`, as far as it may be worth offering; and where there is something.

        Where a request's own text runs out, it goes on from the match again: text that repeats itself, goes on so.
        """
        certain = self.trust.best(source - 1, np.minimum(length + LONGEST // 4, LONGEST))
        reach = np.clip(math.log(LEAST_MASS) / np.log(np.clip(certain, 0.05, 0.97)), 1, MAX_DEPTH)
        steps = np.arange(int(reach.max()))
        period = np.where(source == ROWS, MAX_DEPTH, ends - 1 - at)
        tokens = self.store.index.tokens
        places = np.minimum((at + 1)[:, None] + steps % period[:, None], len(tokens) - 1)
        texts = tokens[places]
        return texts, np.logical_and.accumulate((texts > 0) & (steps < reach[:, None]), axis=1)

    def _learn(self, offer: Offer, requests: Sequence[Writing], committed: Sequence[Sequence[int]]) -> None:
        """Walk every offered tree along what was committed: whose turn came, and who was right."""
        batch, width = offer.tokens.shape
        lengths = np.array([len(tokens) for tokens in committed])
        longest = int(lengths.max(initial=0))
        if not longest:
            return
        written = np.full((batch, longest), -1)
        written[np.arange(longest) < lengths[:, None]] = np.concatenate(
            [np.asarray(t, dtype=np.int64) for t in committed]
        )
        due = (np.arange(width) < offer.counts[:, None]) & (offer.depths <= lengths[:, None])
        lines = np.arange(batch)[:, None]
        # Rows of flat arrays: each request's root, which is right, then its nodes.
        right = np.ones((batch, width + 1), dtype=bool)
        right[:, 1:] = due & (offer.tokens == written[lines, np.clip(offer.depths - 1, 0, longest - 1)])
        up = np.zeros((batch, width + 1), dtype=np.int64)
        up[:, 1:] = offer.parents + 1
        up = (up + lines * (width + 1)).ravel()
        path, above = right.ravel(), up
        for _ in range(min(longest, offer.max_depth).bit_length()):
            path, above = path & path[above], above[above]
        looked_at = due & path[up].reshape(batch, width + 1)[:, 1:]
        rows = np.array([r.row for r in requests])
        owner = rows[looked_at.nonzero()[0]]
        self.trust.learn(self._cells[looked_at], owner, right[:, 1:][looked_at], batch)


def _groups(keys: np.ndarray) -> tuple[Whole, Whole, Whole]:
    """Equal keys `[n]` as groups: an order of the n in which they lie together, where each group starts in it, and the
    group of each key."""
    order = keys.argsort()
    ordered = keys[order]
    new = np.empty(len(keys), dtype=bool)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    group = np.empty(len(keys), dtype=np.int64)
    group[order] = new.cumsum() - 1
    return order, new.nonzero()[0], group


# An odd factor for the token at each depth, and one that keeps requests apart: see `_grow`.
_FACTORS = np.random.default_rng(11).integers(1 << 62, size=MAX_DEPTH).astype(np.uint64) * np.uint64(2) + np.uint64(1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_LIGHTER = 1e-9
