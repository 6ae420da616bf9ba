"""Targets with linear-attention layers: one state a request, so chains or plain decoding, and every output exact."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cast_ray import Engine, SamplingParams
from cast_ray.calibration.measure import DeviceProfile
from cast_ray.cli import app
from cast_ray.errors import ConfigError, RequestError
from cast_ray.stats.acceptance import drafter_of, target_of
from cast_ray.width.fixed import FixedWidth
from tests import families
from tests.support import (
    Comparison,
    reference_greedy,
    save_spelling_pair,
    save_tiny_drafter,
    save_tiny_model,
    tiny_engine,
    tiny_prompts,
)


class Pair:
    """A tiny hybrid with its drafter, and transformers' own model of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.target, self.drafter = folder / "target", folder / "drafter"
        config = families.HYBRIDS[name]()
        save_tiny_model(self.target, config, spread=2.0)
        save_tiny_drafter(self.drafter, target=config)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.target, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def engine(self, width: str, **changes: Any) -> Engine:
        return tiny_engine(self.target, self.drafter, width, **changes)


@pytest.fixture(scope="module", params=families.HYBRIDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair("qwen3_5", tmp_path_factory.mktemp("one"))


def test_greedy_output_is_that_of_generate_plain_and_by_chains(pair: Pair) -> None:
    prompts = tiny_prompts(7)
    references = [reference_greedy(pair.model, prompt, 40) for prompt in prompts]
    comparison = Comparison()
    accepted = 0
    for width in ("ar", "chain"):
        engine = pair.engine(width)
        alone = [engine.generate([prompt], SamplingParams(max_tokens=40))[0] for prompt in prompts[:2]]
        together = engine.generate(prompts, SamplingParams(max_tokens=40))
        engine.check_integrity()
        for outs in (alone, together):
            for prompt, reference, out in zip(prompts, references, outs, strict=False):
                comparison.same(pair.model, prompt, out.token_ids, reference)
        accepted = sum(out.stats.tokens_committed - out.stats.rounds for out in together)
    comparison.check()
    # Of chains, some were accepted in part: the state had to go on from within one.
    assert accepted > 20


def test_sampled_output_is_the_same_plain_and_by_chains(pair: Pair) -> None:
    prompts = tiny_prompts(6, seed=8)
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=100 + i) for i in range(len(prompts))]
    plain, chained = (pair.engine(width).generate(prompts, params) for width in ("ar", "chain"))
    comparison = Comparison()
    for prompt, p, one, other in zip(prompts, params, plain, chained, strict=True):
        comparison.same(pair.model, prompt, other.token_ids, one.token_ids, p.temperature, p.seed or 0)
    comparison.check()


@pytest.mark.parametrize("width", ["ar", "chain"])
def test_arrivals_aborts_and_preemptions_leave_every_output_as_it_is_alone(qwen: Pair, width: str) -> None:
    rng = random.Random(5)
    # So few pages that requests are preempted, and computed again from nothing.
    engine = qwen.engine(width, kv_cache_tokens=120, max_nodes=7)
    prompts = {f"r{i}": prompt for i, prompt in enumerate(tiny_prompts(14, seed=9))}
    waiting, done = list(prompts), {}
    while waiting or engine.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.submit(name := waiting.pop(), prompts[name], SamplingParams(max_tokens=30))
        if rng.random() < 0.1:
            engine.abort(rng.choice(list(prompts)))
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion.token_ids
        engine.check_integrity()
    assert engine.stats()["preemptions"] > 0
    assert len(done) > 8
    comparison = Comparison()
    for name, tokens in done.items():
        comparison.same(qwen.model, prompts[name], tokens, reference_greedy(qwen.model, prompts[name], 30))
    comparison.check()


def test_grammars_run_as_chains_with_the_same_output(tmp_path: Path) -> None:
    save_spelling_pair(tmp_path, lambda **changes: families.of("qwen3_5_text", **families.DELTA, **changes)())
    schema = {"type": "object", "properties": {"name": {"enum": ["yes", "no"]}}, "required": ["name"]}
    params = [
        SamplingParams(max_tokens=24, choice=("yes, they came home", "yes, they came here", "no")),
        SamplingParams(max_tokens=24, regex="(the|then|them) [a-c]{3,6} home"),
        SamplingParams(max_tokens=24, temperature=0.7, seed=3, json_schema=schema),
        SamplingParams(max_tokens=24, repetition_penalty=1.3),
    ]
    prompts = ["yes or no", "then", "name", "home"]
    engines = [
        tiny_engine(tmp_path / "target", tmp_path / "drafter", width, max_step_tokens=64) for width in ("ar", "chain")
    ]
    plain, chained = (engine.generate(prompts, params) for engine in engines)
    assert [out.token_ids for out in plain] == [out.token_ids for out in chained]
    assert plain[0].text.startswith(("yes, they came h", "no"))
    assert plain[2].text.startswith("{")
    # What a grammar foresees was verified, at the width of plain decoding as well.
    assert any(out.stats.rounds < len(out.token_ids) - 1 for out in plain[:3])
    with pytest.raises(RequestError, match="choice_probabilities=True: needs a tree of the labels"):
        engines[1].generate(["yes or no"], SamplingParams(choice=("yes", "no"), choice_probabilities=True))


def test_widths_that_ask_for_trees_become_chains_and_that_is_said(qwen: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = qwen.engine("joint")
    notes = engine.stats()["notes"]
    assert any("width 'joint' becomes 'chain'" in note for note in notes)
    assert any("share no prefixes" in note for note in notes)
    assert all(note in caplog.text for note in notes)
    assert engine.stats()["width"]["width"] == "chain"
    alone = tiny_engine(qwen.target, None, "joint", prefix_cache=False)
    assert [note[note.index("width") :] for note in alone.stats()["notes"]] == ["width 'joint' becomes 'ar'"]
    assert qwen.engine("chain", prefix_cache=False).stats()["notes"] == []


def test_a_lookup_beside_the_drafter_or_alone_offers_chains(qwen: Pair) -> None:
    prompts = [prompt * 3 for prompt in tiny_prompts(5, seed=6)]
    references = [reference_greedy(qwen.model, prompt, 40) for prompt in prompts]
    comparison = Comparison()
    for drafter in ("lookup", f"{qwen.drafter}+lookup"):
        engine = qwen.engine("joint", drafter=drafter)
        assert engine.stats()["width"]["width"] == "chain"
        for prompt, reference, out in zip(
            prompts, references, engine.generate(prompts, SamplingParams(max_tokens=40)), strict=True
        ):
            comparison.same(qwen.model, prompt, out.token_ids, reference)
        assert engine.stats()["mean_round_length"] > 1.02
    comparison.check()


def test_what_needs_a_tree_is_refused(qwen: Pair) -> None:
    engine = qwen.engine("chain")
    with pytest.raises(ConfigError, match=r"width='fixed:7': asks for trees, .* Use chain or ar"):
        engine.use_policy(FixedWidth("fixed:7", 7, branching=True))


def test_equal_prompts_one_after_the_other_and_together_are_computed_each_for_itself(qwen: Pair) -> None:
    engine, prompt = qwen.engine("chain", max_step_tokens=16), tiny_prompts(1, seed=4)[0] * 9
    outs = [engine.generate([prompt], SamplingParams(max_tokens=12))[0] for _ in range(2)]
    outs += engine.generate([prompt] * 3, SamplingParams(max_tokens=12))
    outs.append(engine.generate([prompt], SamplingParams(max_tokens=12, temperature=0.9, seed=1, n=2))[0])
    assert len({tuple(out.token_ids) for out in outs[:5]}) == 1
    assert engine.stats()["prefix_tokens_reused"] == 0


def test_the_probe_measures_a_hybrid_and_the_engine_goes_on_rightly(qwen: Pair) -> None:
    engine = qwen.engine("chain", max_nodes=7)
    before = engine.generate([[5, 3, 1]], SamplingParams(max_tokens=10))[0].token_ids
    profile = DeviceProfile(engine.config, target_of(engine), drafter_of(engine), engine.max_context)
    table = profile.table(again=True)
    assert {point.tokens for point in table.verify if point.batch == 1} >= {1, 2, 4, 8}
    assert engine.generate([[5, 3, 1]], SamplingParams(max_tokens=10))[0].token_ids == before


def test_the_pool_holds_attention_layers_alone(qwen: Pair) -> None:
    target = target_of(qwen.engine("ar"))
    assert target.states is not None
    assert target.cache.data.shape[0] == 1
    assert target.states.memory.shape[:2] == (2, 5)


def test_commands_measure_and_check_a_hybrid_and_show_no_tree(qwen: Pair, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "t1 t2"}\n')
    pair = ["--target", str(qwen.target), "--drafter", str(qwen.drafter), "--dtype", "float32", "--device", "cpu"]

    def call(command: str, *options: str) -> Result:
        return CliRunner().invoke(app, [command, "--prompts", str(tmp_path / "prompts.jsonl"), *pair, *options])

    sizes = ["--max-batch-size", "2", "--max-nodes", "7", "--probe-seconds", "2", "--profile-dir", str(tmp_path)]
    measured = call("calibrate", *sizes)
    assert measured.exit_code == 0, measured.output
    assert list(tmp_path.glob("*.json"))
    checked = call("check", "--max-tokens", "8")
    assert checked.exit_code == 0, checked.output
    assert "chain" in checked.output
    assert "fixed" not in checked.output
    swept = call("sweep", "--output", str(tmp_path / "sweep"))
    assert isinstance(swept.exception, ConfigError)
    assert "has a recurrent state" in str(swept.exception)
