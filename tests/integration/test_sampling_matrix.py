"""Every sampling parameter, under every width and batch: the tokens of a plain loop over the whole prefix."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from cast_ray import Completion, Engine, SamplingParams
from cast_ray.request import derive_seed
from cast_ray.stats.comparison import TIE, TIES_PER_TOKEN
from tests.slow_sampling import SlowOutput, slow_decode
from tests.support import qwen3, reference_greedy, save_tiny_drafter, save_tiny_model, tiny_engine

VOCAB = 12
WIDTHS = ("ar", "chain", "fixed:15", "fixed:63", "joint")
END = 3


def engine_for(folder: Path, width: str, **changes: Any) -> Engine:
    return tiny_engine(folder / "target", folder / "drafter", width, **changes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model of 12 words, of which one ends the output, and a drafter that is often right by chance."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "target", qwen3(), spread=2.0)
    config = folder / "target" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": END}))
    save_tiny_drafter(folder / "drafter", target=qwen3())
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    return folder, model.eval()


def draw_params(rng: random.Random, index: int) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.3 else default

    temperature = rng.choice([0, 0, 0.7, 1.2])
    return SamplingParams(
        max_tokens=rng.choice([7, 24, 32]),
        temperature=temperature,
        seed=1000 + index,
        top_p=maybe(rng.uniform(0.3, 0.99), 1.0),
        top_k=maybe(rng.randint(1, 12), 0),
        min_p=maybe(rng.uniform(0.01, 0.4), 0.0),
        repetition_penalty=maybe(rng.uniform(0.7, 1.8), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-4, 4)}, {}),
        bad_words=maybe(("t5", "t1 t7"), ()),
        allowed_token_ids=maybe(tuple(rng.sample(range(VOCAB), 8)), None),
        min_tokens=maybe(rng.randint(1, 7), 0) if temperature else 0,
        stop_token_ids=maybe((9,), ()),
        ignore_eos=maybe(True, False),
        logprobs=maybe(rng.randint(0, 3), None),
        prompt_logprobs=maybe(rng.randint(0, 3), None),
    )


def bad_words_of(params: SamplingParams) -> list[list[int]]:
    return [[5], [1, 7]] if params.bad_words else []


class Tally:
    """As support.Comparison, against a reference that knows how close each of its choices was."""

    def __init__(self) -> None:
        self.tokens = self.ties = 0

    def same(self, ours: list[int], reference: SlowOutput) -> int:
        """Compares; how many tokens agree."""
        parted = next((i for i, (a, b) in enumerate(zip(ours, reference.tokens, strict=False)) if a != b), None)
        if parted is None:
            assert ours == reference.tokens
            self.tokens += len(ours)
            return len(ours)
        self.tokens += parted + 1
        assert reference.gaps[parted] < TIE, f"token {parted}: {ours} instead of {reference.tokens}"
        self.ties += 1
        return parted

    def check(self) -> None:
        assert self.tokens > 500
        assert self.ties <= 1 + self.tokens * TIES_PER_TOKEN


@torch.inference_mode()
def check_prompt_logprobs(model: Any, prompt: list[int], out: Completion) -> None:
    found = out.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for place, entry in enumerate(found[1:], start=1):
        assert entry is not None
        assert entry.token_id == prompt[place]
        assert entry.logprob == pytest.approx(float(logprobs[place - 1, prompt[place]]), abs=1e-4)


@pytest.mark.parametrize(
    ("seed", "count"), [(11, 20), *(pytest.param(seed, 60, marks=pytest.mark.slow) for seed in range(5))]
)
def test_every_combination_gives_the_tokens_of_a_plain_loop(tiny: tuple[Path, Any], seed: int, count: int) -> None:
    folder, model = tiny
    rng = random.Random(seed)
    params = [draw_params(rng, i) for i in range(count)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 9, 30]))] for _ in params]
    prompts[4] = prompts[3]  # of which one finds the other's pages
    references = []
    for prompt, p in zip(prompts, params, strict=True):
        stops = sorted({*p.stop_token_ids, *(() if p.ignore_eos else (END,))})
        references.append(slow_decode(model, prompt, p, seed=p.seed or 0, bad_words=bad_words_of(p), stops=stops))
    tally = Tally()
    accepted = 0
    for width in WIDTHS:
        engine = engine_for(folder, width)
        together = engine.generate(prompts, params)
        few = rng.sample(range(len(prompts)), 3)
        alone = [engine.generate([prompts[i]], params[i])[0] for i in few]
        engine.check_integrity()
        for i, out in [*enumerate(together), *zip(few, alone, strict=True)]:
            agreed = tally.same(out.token_ids, references[i])
            if params[i].logprobs is not None:
                assert out.logprobs is not None
                assert [entry.token_id for entry in out.logprobs] == out.token_ids
                assert all(len(entry.top) == params[i].logprobs for entry in out.logprobs)
                ours = [entry.logprob for entry in out.logprobs[:agreed]]
                assert ours == pytest.approx(references[i].logprobs[:agreed], abs=1e-4)
            if params[i].prompt_logprobs is not None:
                check_prompt_logprobs(model, prompts[i], out)
        accepted += sum(out.stats.tokens_committed - out.stats.rounds for out in together)
    tally.check()
    assert accepted > 60, "the promise is about accepted paths: there must have been some"


@pytest.fixture(scope="module")
def engines(tiny: tuple[Path, Any]) -> dict[str, Engine]:
    return {width: engine_for(tiny[0], width) for width in ("ar", "fixed:31")}


ALONE: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"min_tokens": 9},
    {"logit_bias": {"3": -2, "4": 2.5}},
    {"bad_words": ["t5", "t1 t7"]},
]
IN_PAIRS = [{**first, **second} for first, second in itertools.combinations(ALONE, 2)]


@pytest.mark.parametrize("params", [*ALONE, *IN_PAIRS], ids=str)
def test_greedy_output_is_that_of_generate_with_its_processors(
    tiny: tuple[Path, Any], engines: dict[str, Engine], params: dict[str, Any]
) -> None:
    _, model = tiny
    prompt = [1, 7, 2, 5]
    # In our order. `generate` knows another one, and so other outputs where a bias meets a penalty.
    kept: list[Any] = []
    if "bad_words" in params:
        kept.append(transformers.NoBadWordsLogitsProcessor([[5], [1, 7]], eos_token_id=None))
    if "min_tokens" in params:
        kept.append(transformers.MinNewTokensLengthLogitsProcessor(len(prompt), params["min_tokens"], END))
    if "logit_bias" in params:
        bias = [[[int(token)], float(value)] for token, value in params["logit_bias"].items()]
        kept.append(transformers.SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in params:
        kept.append(transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=30,
        eos_token_id=END,
        pad_token_id=0,
        logits_processor=transformers.LogitsProcessorList(kept),
    )
    for engine in engines.values():
        out = engine.generate([prompt], SamplingParams.from_dict({**params, "max_tokens": 30}))[0]
        assert out.token_ids == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.8},
        {"presence_penalty": -0.6, "frequency_penalty": 0.9},
        {"presence_penalty": 1.2, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.8, "logit_bias": {"4": 2.5}},
        {"frequency_penalty": 0.8, "min_tokens": 9},
        {"presence_penalty": 1.2, "bad_words": ["t5", "t1 t7"]},
    ],
    ids=str,
)
def test_greedy_output_is_that_of_a_plain_loop_where_generate_has_no_processor(
    tiny: tuple[Path, Any], engines: dict[str, Engine], params: dict[str, Any]
) -> None:
    _, model = tiny
    said = SamplingParams.from_dict({**params, "max_tokens": 30})
    reference = slow_decode(model, [1, 7, 2, 5], said, bad_words=bad_words_of(said), stops=[END])
    for engine in engines.values():
        assert engine.generate([[1, 7, 2, 5]], said)[0].token_ids == reference.tokens


def test_a_seed_gives_the_same_tokens_at_every_concurrency_and_after_a_restart(
    tiny: tuple[Path, Any], engines: dict[str, Engine]
) -> None:
    folder, _ = tiny
    prompts: list[Any] = [[i, 2, 3] for i in range(6)]
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=40 + i, ignore_eos=True) for i in range(6)]
    engine = engines["fixed:31"]
    first = [out.token_ids for out in engine.generate(prompts, params)]
    assert [engine.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)] == first
    again = engine_for(folder, "fixed:31", max_batch_size=2)
    assert [out.token_ids for out in again.generate(prompts[::-1], params[::-1])] == first[::-1]
    # One prompt with other seeds, and seeds as a job makes them from its own and the row.
    others = [replace(params[0], seed=derive_seed(7, row, 0)) for row in range(6)]
    outs = engine.generate([prompts[0]] * 6, others)
    assert len({tuple(out.token_ids) for out in outs}) == 6


@pytest.mark.parametrize(
    ("width", "draws"),
    [
        ("fixed:31", 2000),
        pytest.param("ar", 20_000, marks=pytest.mark.slow),
        pytest.param("fixed:31", 20_000, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(tiny: tuple[Path, Any], width: str, draws: int) -> None:
    folder, model = tiny
    engine = engine_for(folder, width, max_batch_size=256, max_step_tokens=4096, kv_cache_tokens=200_000)
    params = [SamplingParams(max_tokens=3, temperature=1.1, top_k=6, seed=i, ignore_eos=True) for i in range(draws)]
    outs = engine.generate([[1, 2, 3]] * draws, params)
    with torch.inference_mode():
        exact = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)

        def chances(prefix: list[int]) -> torch.Tensor:
            logits = model(torch.tensor([prefix])).logits[0, -1].double() / 1.1
            return logits.masked_fill(logits < logits.topk(6).values[-1], float("-inf")).softmax(0)

        first = chances([1, 2, 3])
        for a in range(VOCAB):
            if first[a]:
                second = chances([1, 2, 3, a])
                for b in range(VOCAB):
                    if second[b]:
                        exact[a, b] = first[a] * second[b] * chances([1, 2, 3, a, b])
    seen = torch.zeros_like(exact)
    for out in outs:
        seen[tuple(out.token_ids)] += 1
    assert float(seen[exact == 0].sum()) == 0
    expected = exact[exact > 0] * draws
    order = expected.argsort(descending=True)
    common = int((expected[order] >= 5).sum())
    observed = seen[exact > 0][order]
    counts = [*observed[:common].tolist(), float(observed[common:].sum())]
    wanted = [*expected[order][:common].tolist(), float(expected[order][common:].sum())]
    if wanted[-1] < 5:
        counts, wanted = [*counts[:-2], counts[-2] + counts[-1]], [*wanted[:-2], wanted[-2] + wanted[-1]]
    statistic = sum((count - want) ** 2 / want for count, want in zip(counts, wanted, strict=True))
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    assert float(torch.special.gammaincc(half[0], half[1])) > 1e-3


def test_samples_of_one_request_differ_and_each_can_be_had_alone(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    engine = engine_for(folder, "fixed:15")
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=4, ignore_eos=True)
    out = engine.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]], params)[0]
    samples = [out, *out.others]
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    assert engine.stats()["prefix_tokens_reused"] == 3 * 8
    for index, sample in enumerate(samples):
        assert sample.seed == derive_seed(5, "sample", index)
        again = SamplingParams(max_tokens=12, temperature=1.0, seed=sample.seed, ignore_eos=True)
        assert engine.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]], again)[0].token_ids == sample.token_ids
    # Without a seed one is drawn and told.
    drawn = engine.generate([[1, 2]], SamplingParams(max_tokens=9, temperature=1.0))[0]
    again = SamplingParams(max_tokens=9, temperature=1.0, seed=drawn.seed)
    assert engine.generate([[1, 2]], again)[0].token_ids == drawn.token_ids
    engine.check_integrity()


def test_max_tokens_is_exact_inside_an_accepted_path(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    reference = reference_greedy(model, [4, 4, 4], 24)
    engine = engine_for(folder, "fixed:63")
    for most in range(1, 24):
        out = engine.generate([[4, 4, 4]], SamplingParams(max_tokens=most, ignore_eos=True))[0]
        assert out.token_ids == reference[:most]
        assert out.finish_reason == "length"
