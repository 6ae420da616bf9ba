"""A drafter's scores -> the N prefixes of greatest mass, sorted, for a whole batch at once.

Packing happens once a round at the widest width; every narrower tree is a slice. It does not choose the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cast_ray.errors import ConfigError, DrafterError, describe
from cast_ray.trees.tree import CandidateTree

NEVER = float("-inf")


@dataclass(frozen=True)
class DraftScores:
    """What a drafter says of the next D tokens of B requests, K candidates a depth.

    logprobs: [B, D, K] float32, log q_d of a candidate after all that may not be emitted was masked. -inf (and NaN, as
        a drafter that overflows gives it) may not be emitted. In any order along K.
    token_ids: [B, D, K] int64, distinct within each (b, d).
    pairwise: [B, D-1, K, K] float32 or None. `[b, d-1, j, k]` is added to the score of candidate k at depth d+1 where
        its parent is candidate j at depth d. The conditional is then a softmax over the K candidates alone,
        `log q_{d+1}(k | j) = log_softmax_k(logprobs[b, d, k] + pairwise[b, d-1, j, k])` with depths counted from 1 and
        `logprobs` indexed from 0: mass outside the K candidates is not held back. -inf stays -inf.
    """

    logprobs: Tensor
    token_ids: Tensor
    pairwise: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.logprobs.shape)
        if len(shape) != 3 or 0 in shape[1:]:
            raise DrafterError(describe("logprobs.shape", shape, "is not [B, D, K]", "Draft at least one candidate"))
        if tuple(self.token_ids.shape) != shape:
            problem = f"differs from the logprobs' {shape}"
            raise DrafterError(describe("token_ids.shape", tuple(self.token_ids.shape), problem, "Give one id a score"))
        batch, depth, candidates = shape
        wanted = (batch, depth - 1, candidates, candidates)
        if self.pairwise is not None and tuple(self.pairwise.shape) != wanted:
            remedy = f"It is [B, D-1, K, K], here {wanted}"
            raise DrafterError(
                describe("pairwise.shape", tuple(self.pairwise.shape), "does not fit the logprobs", remedy)
            )


def pack(scores: DraftScores, max_nodes: int) -> CandidateTree:
    """The `max_nodes` prefixes of greatest mass of every request (CAST's and DDTree's tree), heaviest first.

    The mass of a prefix is the product of its tokens' (conditional) probabilities. Equal masses: the shallower first,
    then the one with the earlier parent, then a fixed order of its children; so every slice of the result is closed
    under parents. Prefixes of mass zero are no nodes; where there are fewer than `max_nodes`, the rest is padding.
    Sorting is by log mass: prefixes too light for float32 keep their order.

    Raises ConfigError when `max_nodes` is below 1.
    """
    return _merge_depths(*_grow(scores, _at_least_one(max_nodes)), scores.token_ids)


def pack_chain(scores: DraftScores, max_nodes: int) -> CandidateTree:
    """The likeliest child at each depth, from the root on: DFlash's chain, at most `max_nodes` long, then padding.

    Where a child's probability depends on its parent, this is the path of a drafter that selects greedily; the heaviest
    prefix of its length may be another. Raises ConfigError when `max_nodes` is below 1.
    """
    log_masses, _, candidates = _grow(scores, 1)
    length = min(_at_least_one(max_nodes), log_masses.shape[1])
    padding = (0, max_nodes - length)
    best = torch.nn.functional.pad(log_masses[:, :length, 0], padding, value=NEVER)
    tokens = scores.token_ids[:, :length].gather(2, candidates[:, :length]).squeeze(2)
    no_node = best == NEVER
    places = torch.arange(max_nodes, device=best.device).expand_as(best)
    return CandidateTree(
        tokens=torch.nn.functional.pad(tokens, padding).masked_fill_(no_node, 0),
        parents=(places - 1).masked_fill_(no_node, -1),
        depths=(places + 1).masked_fill_(no_node, 0),
        masses=best.exp().cummin(dim=1).values,
        counts=max_nodes - no_node.sum(dim=1),
        max_depth=length,
    )


def _at_least_one(max_nodes: int) -> int:
    if max_nodes < 1:
        raise ConfigError(describe("max_nodes", max_nodes, "must be at least 1", "A width of 0 needs no tree"))
    return max_nodes


def _grow(scores: DraftScores, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best `nodes` prefixes of each depth, grown from the best `nodes` of the depth before.

    Returns log masses [B, D, nodes] sorted along the last, the rank of each one's parent at the depth before
    [B, D-1, nodes], and its candidate's index in K [B, D, nodes].
    """
    if scores.pairwise is None:
        return _grow_independent(scores.logprobs, nodes)
    return _grow_conditional(scores.logprobs, scores.pairwise, nodes)


def _as_log_probability(values: Tensor) -> Tensor:
    # At most 0, so that in floating point too a child never outweighs its parent.
    return torch.nan_to_num(values.float(), nan=NEVER, posinf=0.0, neginf=NEVER).clamp_(max=0.0)


def _heaviest(log_masses: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row of [B, M] float32 values <= 0, and their indices; ties in index order.

    `topk` promises no order among ties and a stable sort costs several times as much. The bits of a float of one
    sign are ordered as the float is, so (bits, index) is one integer key without ties.
    """
    bits = log_masses.abs().view(torch.int32)
    # index + 2**32 * bits, in one pass
    keys = torch.add(torch.arange(log_masses.shape[1], device=log_masses.device), bits, alpha=1 << 32)
    indices = keys.topk(count, dim=1, largest=False).values & 0xFFFFFFFF
    return log_masses.gather(1, indices), indices


@cache  # for good: captured packing reads them where they lie
def _frontier(prefixes: int, candidates: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pairs (i-th best prefix, j-th best next token) that can be among the `prefixes` best: (i+1)(j+1) <= prefixes.

    Both lists are sorted, so a pair is preceded by all (i+1)(j+1)-1 others of no higher ranks: some
    N ln N pairs are left of N*K, and the order of ties is unharmed. Two [pairs] int64, in the order of i, then j.
    """
    pairs = [(i, j) for i in range(prefixes) for j in range(min(candidates, prefixes // (i + 1)))]
    parent, child = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
    return parent.contiguous(), child.contiguous()


def _grow_independent(logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `_grow`, where depths are independent."""
    batch, depths, candidates = logprobs.shape
    kept = min(candidates, nodes)
    ranked, order = _as_log_probability(logprobs).sort(dim=2, descending=True, stable=True)
    parent_of, child_of = _frontier(nodes, kept, logprobs.device)
    steps = ranked.index_select(2, child_of)  # [B, D, pairs]
    levels = [torch.nn.functional.pad(ranked[:, 0, :kept], (0, nodes - kept), value=NEVER)]
    picks = []
    for depth in range(1, depths):
        level, pick = _heaviest(levels[-1].index_select(1, parent_of) + steps[:, depth], nodes)
        levels.append(level)
        picks.append(pick)
    first = torch.arange(nodes, device=logprobs.device).clamp(max=kept - 1).expand(batch, 1, nodes)
    if not picks:
        return levels[0].unsqueeze(1), first[:, :0], order.gather(2, first)
    picked = torch.stack(picks, dim=1)
    child_ranks = torch.cat([first, child_of[picked]], dim=1)
    return torch.stack(levels, dim=1), parent_of[picked], order.gather(2, child_ranks)


def _grow_conditional(logprobs: Tensor, pairwise: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `_grow`, where a candidate's probability depends on its parent."""
    batch, depths, candidates = logprobs.shape
    joint = torch.nan_to_num(logprobs[:, 1:].float().unsqueeze(2) + pairwise, nan=NEVER, neginf=NEVER)
    # A row with no candidate left gives NaN, which is no probability either.
    conditional = _as_log_probability(joint.log_softmax(dim=3))  # [B, D-1, parent, K]

    kept = min(candidates, nodes)
    level, tail = _heaviest(_as_log_probability(logprobs[:, 0]), kept)
    levels = [torch.nn.functional.pad(level, (0, nodes - kept), value=NEVER)]
    tails = [torch.nn.functional.pad(tail, (0, nodes - kept))]
    parent_ranks = []
    for depth in range(depths - 1):
        row = tails[-1].unsqueeze(2).expand(batch, nodes, candidates)
        grown = levels[-1].unsqueeze(2) + conditional[:, depth].gather(1, row)
        level, pick = _heaviest(grown.flatten(1), nodes)
        levels.append(level)
        tails.append(pick % candidates)
        parent_ranks.append(pick // candidates)
    parents = torch.stack(parent_ranks, dim=1) if parent_ranks else tail.new_empty(batch, 0, nodes)
    return torch.stack(levels, dim=1), parents, torch.stack(tails, dim=1)


def _merge_depths(log_masses: Tensor, parent_ranks: Tensor, candidates: Tensor, token_ids: Tensor) -> CandidateTree:
    """The best of all depths together; depths lie side by side, so a tie keeps the shallower first.

    log_masses, candidates: [B, D, N]; parent_ranks: [B, D-1, N]; token_ids: [B, D, K].
    """
    batch, depths, nodes = log_masses.shape
    device = log_masses.device
    best, slots = _heaviest(log_masses.flatten(1), nodes)
    places = torch.zeros(batch, depths * nodes, dtype=torch.int64, device=device)
    places.scatter_(1, slots, torch.arange(nodes, device=device).expand(batch, nodes))
    no_node = best == NEVER

    above = torch.arange(depths - 1, device=device).unsqueeze(1) * nodes
    parent_slots = torch.nn.functional.pad((parent_ranks + above).flatten(1), (nodes, 0))
    depth = slots // nodes
    parents = places.gather(1, parent_slots.gather(1, slots))
    token_at = depth * token_ids.shape[2] + candidates.flatten(1).gather(1, slots)
    return CandidateTree(
        tokens=token_ids.flatten(1).gather(1, token_at).masked_fill_(no_node, 0),
        parents=parents.masked_fill_(no_node | (depth == 0), -1),
        depths=(depth + 1).masked_fill_(no_node, 0),
        # A vectorised exp may be off by a last bit either way; the promise that masses never rise is kept here.
        masses=best.exp().cummin(dim=1).values,
        counts=nodes - no_node.sum(dim=1),
        max_depth=min(depths, nodes),
    )
