"""The gated delta rule of linear-attention layers: what a request's state gives to its new tokens, and becomes by them.

    S_i = exp(g_i) S_(i-1) + k_i u_i',   u_i = beta_i (v_i - exp(g_i) S_(i-1)' k_i),   out_i = S_i' q_i

(Yang et al., Gated Delta Networks, 2024). A chunk of tokens is solved at once, as a triangular system in the u. Pure
functions of float32 tensors, laid out `[b, heads, L, dim]`; it knows no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens solved at once where they are many: the work grows with the square of it.
CHUNK = 64


@dataclass(frozen=True)
class Solved:
    """What a state needs of some tokens to move past them.

    keys: `[b, heads, L, k_dim]`; updates: `[b, heads, L, v_dim]`, the u; decay: `[b, heads, L]`, the summed g.
    """

    keys: Tensor
    updates: Tensor
    decay: Tensor


def solve(
    queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, strengths: Tensor, state: Tensor
) -> tuple[Tensor, Solved]:
    """The outputs `[b, heads, L, v_dim]` of L tokens behind `state`, and what moves the state past them.

    queries, keys: `[b, heads, L, k_dim]`, normalised and scaled. values: `[b, heads, L, v_dim]`. gates, strengths:
    `[b, heads, L]`, the g, at most 0, and the beta. state: `[b, heads, k_dim, v_dim]`, left as it is. A token sees
    those before it alone, so what follows a token changes nothing of it.
    """
    decay = gates.cumsum(dim=-1)
    # exp of a difference above the diagonal could overflow before it is masked.
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    kept = decay.exp()[..., None]
    strength = strengths[..., None]
    system = (strength * between * (keys @ keys.mT)).tril(-1)
    wanted = strength * (values - kept * (keys @ state))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = kept * (queries @ state) + (between * (queries @ keys.mT)) @ updates
    return out, Solved(keys, updates, decay)


def advance(state: Tensor, solved: Solved, lengths: Tensor) -> Tensor:
    """The state behind the first `lengths` `[b]` (int64, at least 1) of the solved tokens."""
    last = (lengths - 1).view(-1, 1, 1)
    heads = solved.decay.shape[1]
    end = solved.decay.gather(2, last.expand(-1, heads, 1))  # [b, heads, 1]
    past = torch.arange(solved.decay.shape[2], device=state.device) > last
    weights = (end - solved.decay).masked_fill(past, float("-inf")).exp()
    return end.exp()[..., None] * state + (solved.keys * weights[..., None]).mT @ solved.updates


def run_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, strengths: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `solve` for any number of tokens, all of them kept: the outputs, and the state behind the last."""
    outs = []
    tokens = (queries, keys, values, gates, strengths)
    for q, k, v, g, beta in zip(*(t.split(CHUNK, dim=2) for t in tokens), strict=True):
        out, solved = solve(q, k, v, g, beta, state)
        outs.append(out)
        whole = torch.full((state.shape[0],), out.shape[2], device=state.device)
        state = advance(state, solved, whole)
    return torch.cat(outs, dim=2), state
