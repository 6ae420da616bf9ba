"""Every sampling parameter, under every width and batch: the tokens of a plain loop over the whole prefix."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from cast_ray import Completion, Engine, EngineConfig, SamplingParams
from cast_ray.errors import RequestError
from cast_ray.request import derive_seed
from cast_ray.stats.comparison import TIE, TIES_PER_TOKEN
from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.fixed import FixedWidth
from tests.byte_tokenizer import byte_level
from tests.slow_sampling import SlowOutput, slow_decode
from tests.support import qwen3, reference_greedy, save_tiny_drafter, save_tiny_model

VOCAB = 12
WIDTHS = ("ar", "chain", "fixed:15", "fixed:63", "joint")
END = 3


def engine_for(folder: Path, width: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "width": width,
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_batch_size": 5,
        "max_step_tokens": 24,
        "probe_seconds": 1.0,
        # A random drafter is to go on drafting.
        "watch_drafter": False,
        "profile_dir": folder / "profiles",
    }
    return Engine(EngineConfig(**{**settings, **changes}))


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


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, which can write any text; its end token is the tokenizer's."""
    folder = tmp_path_factory.mktemp("spelling")
    tokenizer = byte_level()
    config = qwen3(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024)
    save_tiny_model(folder / "target", config, spread=1.0)
    tokenizer.save_pretrained(folder / "target")
    path = folder / "target" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": tokenizer.eos_token_id}))
    save_tiny_drafter(folder / "drafter", target=config)
    return folder


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


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "owner": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "vip": {"type": "boolean"}},
                "required": ["id", "vip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "kind", "owner"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
        "required": ["code"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}]},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": "x"}], "items": False, "minItems": 2},
]


def test_documents_are_valid_and_the_same_at_every_width(spelling: Path) -> None:
    rng = random.Random(2)
    schemas = [SCHEMAS[i % len(SCHEMAS)] for i in range(200)]
    params = [
        SamplingParams.from_dict({"max_tokens": 160, "temperature": 0.7, "seed": i, "json_schema": json.dumps(s)})
        for i, s in enumerate(schemas)
    ]
    prompts: list[Any] = [[rng.randrange(200) for _ in range(5)] for _ in schemas]
    engine = engine_for(spelling, "ar", kv_cache_tokens=40_000, max_batch_size=64, max_step_tokens=2048)
    outs = engine.generate(prompts, params)
    finished = 0
    for schema, out in zip(schemas, outs, strict=True):
        if out.finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(out.text), schema)
    assert finished >= 180, "white space can go on for ever, but seldom does"
    stats = engine.stats()
    print(f"{finished} documents; host {stats['host_ms']:.0f} ms, target {stats['verify_ms']:.0f} ms", stats["host"])
    trees = engine_for(spelling, "fixed:15", kv_cache_tokens=20_000)
    few = trees.generate(prompts[:10], params[:10])
    assert [out.token_ids for out in few] == [out.token_ids for out in outs[:10]]
    trees.check_integrity()


LABELS = ["yes", "no", "name", "maybe so", "é", "x", "xy", "other"]


def test_labels_of_200_rows_are_the_constrained_argmax_with_exact_probabilities(spelling: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(spelling / "target", dtype=torch.float32).eval()
    tokenizer = byte_level()
    prompts: list[Any] = [[i % 90, i // 9, 2] for i in range(200)]
    params = SamplingParams(choice=tuple(LABELS), choice_probabilities=True, max_tokens=20)
    engine = engine_for(spelling, "fixed:7", kv_cache_tokens=20_000, max_batch_size=32, max_step_tokens=2048)
    outs = engine.generate(prompts, params)
    plain = engine_for(spelling, "ar", kv_cache_tokens=20_000, max_batch_size=32, max_step_tokens=2048)
    bare = plain.generate(prompts, replace(params, choice_probabilities=False))
    chances = Chances(model)
    for out, other in zip(outs, bare, strict=True):
        assert out.text in LABELS
        assert out.finish_reason == "stop"
        assert out.stats.rounds == 1, "one forward knows all labels"
        assert out.stats.draft_rounds == 0, "no drafter knows more of them"
        assert other.token_ids == out.token_ids
        assert other.choice_probabilities is None
        assert sum((out.choice_probabilities or {}).values()) == pytest.approx(1)
    assert sum(out.stats.rounds for out in bare) < 1.5 * len(bare), "the rest of a label is not asked for"
    # What was appended unasked is in no page that others may share.
    grown: list[Any] = [[*p, *out.token_ids, 1] for p, out in zip(prompts, bare, strict=True) if len(out.token_ids) > 3]
    fresh = engine_for(spelling, "ar", prefix_cache=False)
    further = SamplingParams(max_tokens=3, ignore_eos=True)
    assert grown
    assert [out.token_ids for out in plain.generate(grown[:4], further)] == [
        out.token_ids for out in fresh.generate(grown[:4], further)
    ]
    for prompt, out in list(zip(prompts, outs, strict=True))[::8]:
        assert out.text == constrained_argmax(chances, prompt, LABELS, tokenizer)
        weights = {label: weight(chances, prompt, label, LABELS, tokenizer) for label in LABELS}
        found = out.choice_probabilities
        assert found is not None
        for label in LABELS:
            assert found[label] == pytest.approx(weights[label] / sum(weights.values()), abs=1e-4)


class Pupil(FixedWidth):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__("pupil", 7, branching=True)
        self.shown: list[tuple[CandidateTree, torch.Tensor, Accepted]] = []

    def observe(
        self, tree: CandidateTree, widths: torch.Tensor, accepted: Accepted, temperatures: torch.Tensor | None
    ) -> None:
        self.shown.append((tree, widths, accepted))


def test_what_a_grammar_foresaw_is_nothing_that_a_policy_or_the_drafters_watch_learns_from(spelling: Path) -> None:
    engine = engine_for(spelling, "fixed:7", watch_drafter=True)
    pupil = Pupil()
    engine.use_policy(pupil, health=engine.health)
    assert engine.health is not None
    heard: list[int] = []
    observe = engine.health.observe
    engine.health.observe = lambda requests, *rest: (heard.append(requests), observe(requests, *rest))  # type: ignore
    # Decoded from the first step on, in this order.
    engine.submit("plain", [5], SamplingParams(max_tokens=12))
    engine.submit("name", [6], SamplingParams(regex="name: (yes|no){3}", max_tokens=12))
    engine.submit("label", [7], SamplingParams(choice=LABELS, choice_probabilities=True))
    while engine.has_work:
        engine.step()
    tree, widths, accepted = pupil.shown[0]
    assert tree.max_nodes == 7
    assert widths.tolist() == [7, 0, 0]
    assert tree.counts[1:].tolist() == [0, 0]
    assert accepted.lengths[1:].tolist() == [1, 1]
    assert set(heard) <= {0, 1}
    assert heard[0] == 1


def test_plain_decoding_keeps_places_for_trees_only_behind_structured_requests(spelling: Path) -> None:
    engine = engine_for(spelling, "ar", kv_cache_tokens=40, max_nodes=31)
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=36, ignore_eos=True))[0].token_ids) == 36
    with pytest.raises(RequestError, match="kv_cache_tokens"):
        engine.generate([[5, 6, 7]], SamplingParams(regex="[a-z]{30}", max_tokens=36))
    assert engine.generate([[5, 6, 7]], SamplingParams(regex="yes", max_tokens=4))[0].text == "yes"


class Chances:
    """The target's probabilities behind a context, computed once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def __call__(self, context: list[int]) -> torch.Tensor:
        key = tuple(context)
        if key not in self._known:
            self._known[key] = self._model(torch.tensor([context])).logits[0, -1].double().softmax(0)
        return self._known[key]


def weight(chances_after: Chances, prompt: list[int], label: str, labels: list[str], tokenizer: Any) -> float:
    ids = tokenizer(label)["input_ids"]
    chance = 1.0
    for place, token in enumerate(ids):
        chance *= float(chances_after(prompt + ids[:place])[token])
    spelled = [tokenizer(other)["input_ids"] for other in labels]
    longer = {other[len(ids)] for other in spelled if other[: len(ids)] == ids and len(other) > len(ids)}
    return chance * (1 - sum(float(chances_after(prompt + ids)[token]) for token in longer))


def constrained_argmax(chances_after: Chances, prompt: list[int], labels: list[str], tokenizer: Any) -> str:
    spelled = {label: [*tokenizer(label)["input_ids"], tokenizer.eos_token_id] for label in labels}
    path: list[int] = []
    while True:
        left = {label: ids for label, ids in spelled.items() if ids[: len(path)] == path}
        if len(left) == 1:
            return next(iter(left))
        chances = chances_after(prompt + path)
        path.append(max({ids[len(path)] for ids in left.values()}, key=lambda token: float(chances[token])))


def test_stop_strings_end_the_output_wherever_they_fall(spelling: Path) -> None:
    engines = {width: engine_for(spelling, width) for width in ("ar", "fixed:31")}
    prompt: list[Any] = [[5, 6, 7]]
    tokenizer = byte_level()
    words = tuple(sorted({token for text in ("abcdef no ", "yes name") for token in tokenizer(text)["input_ids"]}))
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "allowed_token_ids": words}
    whole = engines["ar"].generate(prompt, SamplingParams(**common))[0]
    tried = 0
    for start in range(2, 50, 5):
        # Two tokens and a bit: it begins in one token and ends in another.
        before = tokenizer.decode(whole.token_ids[:start])
        stop = whole.text[len(before) : len(before) + 3]
        if whole.text.find(stop) != len(before):
            continue
        tried += 1
        for include in (False, True):
            params = SamplingParams(**common, stop=(stop,), include_stop_str_in_output=include)
            for engine in engines.values():
                out = engine.generate(prompt, params)[0]
                assert out.text == before + (stop if include else "")
                assert (out.finish_reason, out.stop_reason) == ("stop", stop)
                assert out.token_ids == whole.token_ids[: len(out.token_ids)]
                assert stop in tokenizer.decode(out.token_ids)
                assert stop not in tokenizer.decode(out.token_ids[:-1])
    assert tried >= 5


def test_max_tokens_is_exact_inside_an_accepted_path(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    reference = reference_greedy(model, [4, 4, 4], 24)
    engine = engine_for(folder, "fixed:63")
    for most in range(1, 24):
        out = engine.generate([[4, 4, 4]], SamplingParams(max_tokens=most, ignore_eos=True))[0]
        assert out.token_ids == reference[:most]
        assert out.finish_reason == "length"


def test_the_prompt_is_repeated_on_request(spelling: Path) -> None:
    engine = engine_for(spelling, "fixed:7")
    plain = engine.generate(["no name"], SamplingParams(max_tokens=4))[0]
    echoed = engine.generate(["no name"], SamplingParams(max_tokens=4, echo=True))[0]
    assert echoed.text == "no name" + plain.text


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"logit_bias": {9999: 1.0}}, "logit_bias=9999"),
        ({"allowed_token_ids": [0, 9999]}, "allowed_token_ids=9999"),
        ({"stop_token_ids": [9999]}, "stop_token_ids=9999"),
        ({"regex": "(open"}, "regex"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema"),
        ({"choice": ["a" * 100], "choice_probabilities": True}, "max_nodes"),
        ({"bad_words": ["x"], "allowed_token_ids": byte_level()("x")["input_ids"]}, "bad_words"),
    ],
    ids=str,
)
def test_what_the_target_cannot_do_is_an_error_of_that_request_alone(
    spelling: Path, params: dict[str, Any], said: str
) -> None:
    engine = engine_for(spelling, "ar")
    engine.submit("good", [1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match=said):
        engine.submit("bad", [1, 2], SamplingParams.from_dict(params))
    done = [event for _ in range(5) for event in engine.step() if event.completion]
    assert [event.request_id for event in done] == ["good"]
