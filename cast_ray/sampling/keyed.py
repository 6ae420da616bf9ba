"""The token that a target emits: argmax, or a sample whose randomness is keyed by (seed, position).

Sampling is Gumbel-max: the token of greatest `logit / T + g(seed, position, token)`, with the noise `g` from a
counter-based hash. So a token is a function of prefix, seed and position alone, whatever the tree, batch or device.
Inverse-CDF sampling would not do: a tiny change of any logit moves the whole cumulative sum.

Two ways to the same token: noise for those alone that can still win, whose number the host has to know; and noise for
all, in shapes that no value decides, where looking at values means waiting for a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# splitmix64's constants as signed 64-bit numbers (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

# Uniforms are (h + 0.5) / 2**32 with a 32-bit hash h, so the noise is bounded: -log(-log(u)).
_BITS = 32
GUMBEL_MAX = 22.88  # a little above -log(-log((2**32 - 0.5) / 2**32)) = 22.8739
# A token further than this behind the best needs noise above it: one hash in 3,000, told by the hash itself.
_NEAR = 8.0
_RARE = int(math.exp(-math.exp(-_NEAR)) * 2**_BITS) - 1000  # somewhat lower than exact, to be safe from rounding
# Scores that are perturbed at once where all are: a few copies of them, 32 MB each, are a small part of a device.
_AT_ONCE = 1 << 22


def keyed_gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for (seed, position, token): int64 tensors of one shape -> float64 of that shape."""
    return _gumbel(_hash(_state(seeds, positions), tokens))


def perturbed_scores(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """All scores whose argmax is the sampled token: `[n, vocab]` float64. The plain reference of `choose_tokens`.

    Rows with temperature 0 are the logits themselves.
    """
    n, vocab = logits.shape
    tokens = torch.arange(vocab, device=logits.device).expand(n, vocab)
    noise = keyed_gumbel(seeds[:, None].expand(n, vocab), positions[:, None].expand(n, vocab), tokens)
    sampled = temperatures > 0
    scale = torch.where(sampled, temperatures, 1.0).double()[:, None]
    return logits.double() / scale + torch.where(sampled[:, None], noise, 0.0)


def choose_tokens(
    logits: Tensor, temperatures: Tensor | None, seeds: Tensor, positions: Tensor, *, fixed: bool = False
) -> Tensor:
    """The target's own token for each row.

    logits: `[n, vocab]`; temperatures: `[n]` float, 0 is greedy, None says that all are; seeds: `[n]` int64;
    positions: `[n]` int64, index of the emitted token in its request (prompt included) -> `[n]` int64.
    fixed: in shapes that no value decides, so that nothing waits for the device; the tokens are the same.
    """
    greedy = logits.argmax(dim=-1)
    if temperatures is None or logits.shape[0] == 0:
        return greedy
    if fixed:
        return torch.where(temperatures > 0, _sample_all(logits, temperatures, _state(seeds, positions)), greedy)
    sampled = (temperatures > 0).nonzero()[:, 0]
    scaled = logits[sampled].float() / temperatures[sampled, None]
    tokens = _sample(scaled, greedy[sampled], _state(seeds[sampled], positions[sampled]))
    return greedy.index_copy(0, sampled, tokens)


def _sample(scaled: Tensor, greedy: Tensor, state: Tensor) -> Tensor:
    """Gumbel-max over `scaled` `[n, vocab]` float32, with noise only for tokens that can still win.

    The greedy token with its noise sets the mark. A token more than GUMBEL_MAX below the mark cannot reach it; one more
    than _NEAR below can only with rare noise, which its hash tells before any logarithm is taken.
    """
    rows = torch.arange(scaled.shape[0], device=scaled.device)
    mark = scaled.gather(1, greedy[:, None])[:, 0].double() + _gumbel(_hash(state, greedy))
    near = (mark - _NEAR).float()[:, None]
    far = (mark - GUMBEL_MAX).float()[:, None]
    near_rows, near_tokens = (scaled >= near).nonzero(as_tuple=True)
    far_rows, far_tokens = ((scaled >= far) & (scaled < near)).nonzero(as_tuple=True)
    lucky = (_hash(state[far_rows], far_tokens) >= _RARE).nonzero()[:, 0]
    # The greedy token itself stands at the end: with very high noise it is not among those near its own mark.
    rows = torch.cat([near_rows, far_rows[lucky], rows])
    tokens = torch.cat([near_tokens, far_tokens[lucky], greedy])
    scores = scaled[rows, tokens].double() + _gumbel(_hash(state[rows], tokens))
    best = scores.new_full((scaled.shape[0],), float("-inf")).scatter_reduce_(0, rows, scores, "amax")
    # Exact ties go to the lowest token id, as argmax has them.
    vocab = scaled.shape[1]
    contender = torch.where(scores == best[rows], tokens, vocab)
    return torch.full_like(greedy, vocab).scatter_reduce_(0, rows, contender, "amin")


def _sample_all(logits: Tensor, temperatures: Tensor, state: Tensor) -> Tensor:
    """Gumbel-max over `logits` `[n, vocab]`, some rows at a time, with noise for all; a greedy row's is meaningless."""
    n, vocab = logits.shape
    tokens = torch.arange(vocab, device=logits.device)
    scale = torch.where(temperatures > 0, temperatures, 1.0)
    chosen, rows = [], max(1, _AT_ONCE // vocab)
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        scores = _gumbel(_hash(state[part, None], tokens))
        chosen.append(scores.add_(logits[part].float() / scale[part, None]).argmax(dim=1))
    return torch.cat(chosen)


def _state(seeds: Tensor, positions: Tensor) -> Tensor:
    """What all tokens of a row share of their hash."""
    return _mix(_mix(seeds) + positions)


def _hash(state: Tensor, tokens: Tensor) -> Tensor:
    """The 32-bit hash of (seed, position, token), as int64."""
    return _shift(_mix(state + tokens), 64 - _BITS)


def _gumbel(hashed: Tensor) -> Tensor:
    uniform = (hashed.to(torch.float64) + 0.5) * 2.0**-_BITS
    return -torch.log(-torch.log(uniform))


def _shift(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: Tensor) -> Tensor:
    """splitmix64's output function; int64 arithmetic wraps as unsigned does."""
    values = values + _GOLDEN
    values = (values ^ _shift(values, 30)) * _MIX_1
    values = (values ^ _shift(values, 27)) * _MIX_2
    return values ^ _shift(values, 31)
