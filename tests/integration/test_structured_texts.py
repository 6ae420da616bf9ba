"""Texts and grammars, under every width and batch: documents, labels, stop strings and what cannot be asked for."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from cast_ray import Engine, SamplingParams
from cast_ray.errors import RequestError
from cast_ray.trees.accept import Accepted
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.fixed import FixedWidth
from tests.byte_tokenizer import byte_level
from tests.support import qwen3, save_spelling_pair, tiny_engine

WIDTHS = ("ar", "chain", "fixed:15", "fixed:63", "joint")


def engine_for(folder: Path, width: str, **changes: Any) -> Engine:
    return tiny_engine(folder / "target", folder / "drafter", width, **changes)


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, which can write any text; its end token is the tokenizer's."""
    folder = tmp_path_factory.mktemp("spelling")
    save_spelling_pair(folder, qwen3)
    return folder


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
