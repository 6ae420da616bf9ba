"""The batched processors give what a slow reference gives for each row by itself, and what transformers' own give."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_ray.models.graph_safety import Watch
from cast_ray.request import SamplingParams
from cast_ray.sampling.check import check_params
from cast_ray.sampling.processors import NUCLEUS_FIXED, Paths, RuleBatch, nucleus_threshold
from cast_ray.sampling.rules import Rules, make_rules
from cast_ray.trees.pack import DraftScores
from tests.byte_tokenizer import byte_level
from tests.slow_sampling import slow_process

VOCAB = 16
CPU = torch.device("cpu")


def draw_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=rng.choice([0, 0.5, 1.3]),
        top_p=maybe(rng.uniform(0.2, 0.99), 1.0),
        top_k=maybe(rng.randint(1, 20), 0),
        min_p=maybe(rng.uniform(0.01, 0.6), 0.0),
        repetition_penalty=maybe(rng.uniform(0.6, 1.9), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(3)}, {}),
        allowed_token_ids=maybe(tuple(rng.sample(range(VOCAB), rng.randint(1, VOCAB))), None),
        min_tokens=maybe(rng.randint(1, 6), 0),
    )


def draw_rows(rng: random.Random, requests: list[Rules | None]) -> tuple[list[list[int]], list[tuple[int, list[int]]]]:
    """Contexts of the requests, and rows (request, path)."""
    contexts = [[rng.randrange(4) for _ in range((r.num_prompt if r else 1) + rng.randint(0, 4))] for r in requests]
    rows = [(b, [rng.randrange(4) for _ in range(rng.randint(0, 4))]) for b in range(len(requests)) for _ in range(4)]
    return contexts, rows


def as_paths(contexts: list[list[int]], rows: list[tuple[int, list[int]]]) -> Paths:
    """Each row's path among the nodes of all paths of its request, and nodes of nobody's path behind them."""
    nodes: list[list[int]] = [[] for _ in contexts]
    own = []
    for b, path in rows:
        own.append(range(len(nodes[b]), len(nodes[b]) + len(path)))
        nodes[b] += path
    width = max(map(len, nodes)) + 2
    held = torch.zeros(len(rows), width, dtype=torch.bool)
    back = torch.full((len(rows), width), -3)
    for row, places in enumerate(own):
        held[row, list(places)] = True
        back[row, list(places)] = torch.arange(len(places)).flip(0)
    padded = torch.tensor([tokens + [1] * (width - len(tokens)) for tokens in nodes])
    return Paths(
        np.asarray([b for b, _ in rows]),
        torch.tensor([len(contexts[b]) + len(path) for b, path in rows]),
        torch.tensor([len(path) for _, path in rows]),
        held,
        padded[[b for b, _ in rows]],
        back,
    )


def draw_rules(rng: random.Random, params: SamplingParams) -> Rules | None:
    prompt = [rng.randrange(4) for _ in range(rng.randint(1, 5))]
    words = [[rng.randrange(4) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice([0, 0, 2]))]
    return make_rules(params, prompt, bad_words=words, stops=[0, 3], vocab_size=VOCAB, device=CPU)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_every_row_is_processed_as_if_it_were_alone(seed: int) -> None:
    rng = random.Random(seed)
    requests = [draw_rules(rng, draw_params(rng)) for _ in range(4)]
    asking = [b for b, rules in enumerate(requests) if rules is not None]
    if not asking:
        return
    contexts, rows = draw_rows(rng, requests)
    for b in asking:
        rules = requests[b]
        assert rules is not None
        if rules.counts is not None:
            # The prompt that was counted is the context's own.
            rules.counts = type(rules.counts)(rules.params, contexts[b][: rules.num_prompt], VOCAB, CPU)
            rules.counts.add(contexts[b][rules.num_prompt :])
    # Whatever is to be done without looking at a value is.
    with Watch() as watch:
        batch = RuleBatch([r for r in requests if r], asking, [contexts[b] for b in asking], CPU, fixed=True)
    assert batch.members.tolist() == asking
    paths = as_paths(contexts, rows)
    keep = np.flatnonzero(np.isin(paths.request, batch.members))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    chosen = logits[keep].clone()
    with watch:
        out = batch.apply(chosen, paths.select(keep))
    assert not watch.reads
    assert not watch.uploads
    assert batch.unsure is None
    for row, values in zip(keep.tolist(), out, strict=True):
        b, path = rows[row]
        rules = requests[b]
        assert rules is not None
        expected = slow_process(
            logits[row], rules.params, contexts[b] + path, rules.num_prompt, rules.bad_words, rules.stops
        )
        torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=1e-5)


def apply_one(params: SamplingParams, context: list[int], logits: torch.Tensor, words: list[list[int]]) -> torch.Tensor:
    rules = make_rules(params, context, bad_words=words, vocab_size=VOCAB, device=CPU)
    assert rules is not None
    paths = as_paths([context], [(0, [])])
    return RuleBatch([rules], [0], [context], CPU).apply(logits.clone()[None], paths)[0]


@pytest.mark.parametrize("seed", range(6))
def test_what_transformers_has_is_the_same(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    context = [rng.randrange(VOCAB) for _ in range(8)]
    words = [[3], [context[-1], 5], [7, 7]]
    ids = torch.tensor([context])
    cases: list[tuple[SamplingParams, Any, list[list[int]]]] = [
        (SamplingParams(repetition_penalty=1.7), transformers.RepetitionPenaltyLogitsProcessor(1.7), []),
        (SamplingParams(), transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None), words),
        (SamplingParams(temperature=1, top_k=5), transformers.TopKLogitsWarper(5), []),
        (SamplingParams(temperature=1, top_p=0.7), transformers.TopPLogitsWarper(0.7), []),
        (SamplingParams(temperature=1, min_p=0.1), transformers.MinPLogitsWarper(0.1), []),
        (SamplingParams(logit_bias={2: 4.5}), transformers.SequenceBiasLogitsProcessor([[[2], 4.5]]), []),
    ]
    for params, processor, banned in cases:
        expected = processor(ids, logits.clone()[None])[0]
        torch.testing.assert_close(apply_one(params, context, logits, banned), expected)


def test_a_request_that_asks_for_nothing_has_no_rules() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
    ):
        assert make_rules(params, [1], stops=[0], vocab_size=VOCAB, device=CPU) is None


def test_a_drafters_scores_lose_what_cannot_be_emitted_and_follow_the_bias() -> None:
    generator = torch.Generator().manual_seed(4)
    full = (torch.randn(4, 3, VOCAB, generator=generator) * 2).log_softmax(dim=2)
    best = full.topk(VOCAB - 4, dim=2)
    scores = DraftScores(best.values, best.indices)
    said = [
        SamplingParams(allowed_token_ids=[1, 2, 3, 5]),
        SamplingParams(temperature=0.5, logit_bias={2: 1.5, 6: -3}),
        SamplingParams(min_tokens=3),
    ]
    # The fourth request has no rules.
    made = [make_rules(p, [7, 7], stops=[0, 3], vocab_size=VOCAB, device=CPU) for p in said]
    rules = [r for r in made if r is not None]
    shaped = RuleBatch(rules, [0, 1, 2], [[7, 7]] * 3, CPU).shape(scores, torch.tensor([1, 1, 2, 1]))
    assert torch.equal(shaped.token_ids, scores.token_ids)
    assert torch.equal(shaped.logprobs[3], scores.logprobs[3])
    assert torch.equal(scores.logprobs, best.values), "the drafter's own are left as they are"
    assert shaped.logprobs.exp().sum(dim=2).max() <= 1 + 1e-5

    def banned(b: int, depth: int) -> set[int]:
        row = shaped.logprobs[b, depth]
        return set(scores.token_ids[b, depth][row == float("-inf")].tolist())

    for depth in range(3):
        drafted = set(scores.token_ids[0, depth].tolist())
        assert banned(0, depth) == drafted - {1, 2, 3, 5}
        # Exactly: the mass of what was not drafted is known too, and keeps its share.
        held = scores.logprobs[1, depth].exp()
        moved = held.clone()
        for place, token in enumerate(scores.token_ids[1, depth].tolist()):
            moved[place] *= math.exp({2: 3.0, 6: -6.0}.get(token, 0.0))
        expected = moved / (moved.sum() + 1 - held.sum())
        torch.testing.assert_close(shaped.logprobs[1, depth].exp(), expected, atol=1e-5, rtol=1e-4)
        # The root at place 2 is output token 0: depths 1 and 2 would be the second and third.
        stops = {0, 3} & set(scores.token_ids[2, depth].tolist())
        assert banned(2, depth) == (stops if depth < 2 else set())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.9999])
def test_a_nucleus_wider_than_the_first_look_is_found(share: float, fixed: bool) -> None:
    values = torch.randn(3, 3000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.01], [1.0], [6.0]])
    threshold, unsure = nucleus_threshold(values, torch.full((3, 1), share), fixed=fixed)
    assert unsure is None
    for row, least in zip(values, threshold, strict=True):
        probabilities = row.double().softmax(0).sort(descending=True).values
        kept = int((row >= least).sum())
        assert probabilities[:kept].sum() >= share - 1e-6
        assert probabilities[: kept - 1].sum() < share + 1e-6


def test_a_nucleus_too_wide_to_be_found_without_a_wait_is_named() -> None:
    flat, steep = torch.randn(2, NUCLEUS_FIXED + 2000, generator=torch.Generator().manual_seed(2))
    values = torch.stack([flat * 0.01, steep * 6, flat])
    share = torch.tensor([[0.9], [0.9], [1.0]])
    exact, none = nucleus_threshold(values, share)
    with Watch() as watch:
        found, unsure = nucleus_threshold(values, share, fixed=True)
    assert not watch.reads
    assert none is None
    assert unsure is not None
    assert unsure.tolist() == [True, False, False]
    assert found[1:].equal(exact[1:])


def test_a_bad_word_that_the_target_cannot_write_needs_no_ban() -> None:
    tokenizer = byte_level()
    params = SamplingParams(bad_words=("yes", "<end>", "a<end>"))
    yes = check_params(SamplingParams(bad_words=("yes",)), len(tokenizer), tokenizer)
    assert check_params(params, tokenizer.eos_token_id, tokenizer) == yes
    assert len(check_params(params, len(tokenizer), tokenizer)) > len(yes)
