"""The delta rule solved by chunks is the recurrence written out, and a state stops where it is told to."""

from __future__ import annotations

import torch
from torch import Tensor

from cast_ray.models.delta import CHUNK, advance, run_chunks, solve

BATCH, HEADS, K, V = 3, 2, 8, 6


def random_tokens(length: int, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, gates and strengths, and a state that they come upon."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, HEADS, *shape, generator=random)

    keys = torch.nn.functional.normalize(normal(length, K), dim=-1)
    # Some gates forget nearly all, as trained ones do.
    gates = -normal(length).exp() * 3
    return [normal(length, K), keys, normal(length, V), gates, normal(length).sigmoid(), normal(K, V)]


def written_out(tokens: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the state behind every token, by the recurrence itself in float64."""
    queries, keys, values, gates, strengths, state = (t.double() for t in tokens)
    outs, states = [], []
    for i in range(queries.shape[2]):
        state = state * gates[:, :, i].exp()[..., None, None]
        update = strengths[:, :, i, None] * (values[:, :, i] - torch.einsum("bhkv,bhk->bhv", state, keys[:, :, i]))
        state = state + torch.einsum("bhk,bhv->bhkv", keys[:, :, i], update)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, queries[:, :, i]))
        states.append(state)
    return torch.stack(outs, dim=2), states


def test_outputs_and_states_are_those_of_the_recurrence() -> None:
    tokens = random_tokens(17)
    expected, states = written_out(tokens)
    out, solved = solve(*tokens)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    lengths = torch.tensor([1, 9, 17])
    found = advance(tokens[-1], solved, lengths)
    for b, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[b].double(), states[length - 1][b], atol=1e-4, rtol=1e-4)


def test_many_tokens_go_by_chunks() -> None:
    tokens = random_tokens(2 * CHUNK + 5, seed=1)
    expected, states = written_out(tokens)
    out, state = run_chunks(*tokens)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.double(), states[-1], atol=1e-4, rtol=1e-4)


def test_what_follows_a_token_changes_nothing_of_it_however_strong_it_decays() -> None:
    tokens = random_tokens(12, seed=2)
    tokens[3][:, :, 7:] = -1e4
    out, solved = solve(*tokens)
    short = [t[:, :, :7] for t in tokens[:-1]]
    alone, _ = solve(*short, tokens[-1])
    torch.testing.assert_close(out[:, :, :7], alone)
    assert solved.updates.isfinite().all()
    assert advance(tokens[-1], solved, torch.tensor([12, 12, 12])).isfinite().all()
