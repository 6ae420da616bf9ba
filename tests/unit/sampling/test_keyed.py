"""Tokens are a function of logits, seed and position; their distribution is the softmax."""

from __future__ import annotations

import pytest
import torch

from cast_ray.models.graph_safety import Watch
from cast_ray.request import derive_seed
from cast_ray.sampling import keyed
from cast_ray.sampling.keyed import GUMBEL_MAX, choose_tokens, keyed_gumbel, perturbed_scores


def rows(n: int, vocab: int, spread: float = 4.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(n, vocab, generator=generator) * spread
    temperatures = torch.rand(n, generator=generator) * 1.5 + 0.01
    seeds = torch.randint(2**62, (n,), generator=generator)
    return logits, temperatures, seeds, torch.arange(n)


def test_the_pruned_choice_is_the_argmax_of_all_perturbed_scores() -> None:
    for vocab, spread in ((3, 0.1), (50, 1.0), (5000, 6.0)):
        logits, temperatures, seeds, positions = rows(300, vocab, spread)
        temperatures[::7] = 0
        chosen = choose_tokens(logits, temperatures, seeds, positions)
        assert torch.equal(chosen, perturbed_scores(logits, temperatures, seeds, positions).argmax(-1))
        assert torch.equal(chosen[::7], logits[::7].argmax(-1))


def test_without_looking_at_values_the_same_tokens_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "_AT_ONCE", 40_000)  # several goes, the last of them shorter
    for vocab, spread in ((3, 0.1), (50, 1.0), (5000, 6.0)):
        logits, temperatures, seeds, positions = rows(300, vocab, spread)
        temperatures[::7] = 0
        logits[::5, ::2] = float("-inf")
        expected = choose_tokens(logits, temperatures, seeds, positions)
        with Watch(strict=True):
            chosen = choose_tokens(logits, temperatures, seeds, positions, fixed=True)
        assert torch.equal(chosen, expected)


def test_a_token_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    logits, temperatures, seeds, positions = rows(40, 200)
    together = choose_tokens(logits, temperatures, seeds, positions)
    alone = [
        choose_tokens(logits[i : i + 1], temperatures[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        for i in range(40)
    ]
    assert torch.equal(together, torch.cat(alone))
    order = torch.randperm(40)
    assert torch.equal(
        choose_tokens(logits[order], temperatures[order], seeds[order], positions[order]), together[order]
    )


def test_seed_and_position_each_matter() -> None:
    logits = torch.zeros(200, 50)
    warm = torch.ones(200)
    same = torch.zeros(200, dtype=torch.int64)
    count = torch.arange(200)
    for seeds, positions in ((count, same), (same, count)):
        assert len(set(choose_tokens(logits, warm, seeds, positions).tolist())) > 30


def test_samples_follow_the_softmax_by_chi_square() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.5])
    n = 20_000
    expected = torch.softmax(logits / 0.8, 0) * n
    for seeds, positions in (
        (torch.arange(n) * 977, torch.full((n,), 5)),
        (torch.full((n,), 42), torch.arange(n)),
    ):
        drawn = choose_tokens(logits.expand(n, 6), torch.full((n,), 0.8), seeds, positions)
        observed = torch.bincount(drawn, minlength=6).float()
        assert float(((observed - expected) ** 2 / expected).sum()) < 20.5  # 0.999 quantile at 5 degrees of freedom


def test_the_noise_is_standard_gumbel_and_bounded() -> None:
    count = torch.arange(400_000)
    noise = keyed_gumbel(count * 0 + 9, count, count % 7)
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - 1.6449) < 0.02
    top = -torch.log(-torch.log(torch.tensor((2**32 - 0.5) / 2**32, dtype=torch.float64)))
    assert float(top) < GUMBEL_MAX < float(top) + 0.01


def test_derived_seeds_are_stable_and_tell_rows_apart() -> None:
    assert derive_seed(7, "row-1", 0) == 4826963313895710826
    seeds = {derive_seed(s, f"row-{r}", n) for s in range(3) for r in range(50) for n in range(3)}
    assert len(seeds) == 450
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "2") != derive_seed("1", 2)
