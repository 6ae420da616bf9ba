"""Lookup drafting is lossless: whatever it suggests, alone or beside a drafter, at every width, batch and store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from cast_ray import Completion, Engine, EngineConfig, SamplingParams
from cast_ray.width.fixed import FixedWidth
from tests.support import TINY, Comparison, qwen3, reference_greedy, save_tiny_drafter, save_tiny_model, tiny_engine

FAMILIES: dict[str, Any] = {
    "qwen3": lambda: qwen3(),
    "llama": lambda: LlamaConfig(**TINY),
    "gemma3_sliding": lambda: Gemma3TextConfig(**TINY, sliding_window=9, query_pre_attn_scalar=8),
}
DRAFTERS = ("lookup", "{}", "{}+lookup")
WIDTHS = ("chain", "fixed:7", "fixed:31", "deployment", "round", "joint")


def prompts_of(count: int, seed: int = 3) -> list[list[int]]:
    """Some that repeat themselves, as lookup likes them, and some that do not."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        tokens = [rng.randrange(12) for _ in range(rng.choice([2, 5, 17]))]
        found.append(tokens * (3 if number % 2 else 1))
    return found


def engine_for(folder: Path, drafter: str, width: str, **changes: Any) -> Engine:
    named = drafter.format(folder / "drafter")
    return tiny_engine(folder / "target", named, width, **{"lookup_tokens": 4096, **changes})


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], scope: str | None) -> list[Completion]:
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(str(number), prompt, one, lookup_scope=scope)
    done: dict[str, Completion] = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    engine.check_integrity()
    return [done[str(number)] for number in range(len(prompts))]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param]()
    save_tiny_model(folder / "target", config, spread=2.0)
    save_tiny_drafter(folder / "drafter", target=config)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    return folder, model.eval()


def test_greedy_output_is_that_of_generate_with_every_source(family: tuple[Path, Any]) -> None:
    folder, model = family
    prompts = prompts_of(7)
    # Random models end in loops: what a prompt holds of one, the output repeats.
    prompts = [[*prompt, *reference_greedy(model, prompt, 30)] if n < 3 else prompt for n, prompt in enumerate(prompts)]
    references = [reference_greedy(model, prompt, 40) for prompt in prompts]
    comparison = Comparison()
    accepted: dict[str, int] = {}
    for drafter in DRAFTERS:
        for width in WIDTHS if "lookup" in drafter else ("fixed:7",):
            engine = engine_for(folder, drafter, width)
            # Twice: the second time the store holds just these outputs.
            for _ in range(2):
                outs = run(engine, prompts, [SamplingParams(max_tokens=40)] * len(prompts), "same")
                for prompt, reference, out in zip(prompts, references, outs, strict=True):
                    comparison.same(model, prompt, out.token_ids, reference)
            stats = engine.stats()
            gained = sum(stats["accepted_by_source"].values())
            # Every committed token is a round's own or an accepted candidate.
            assert stats["tokens_generated"] <= stats["rounds"] + gained
            for name, count in stats["accepted_by_source"].items():
                accepted[name] = accepted.get(name, 0) + count
    comparison.check()
    assert all(accepted[name] > 20 for name in ("drafter", "prompt", "output", "rows")), accepted


def test_sampled_output_does_not_depend_on_what_the_store_holds(family: tuple[Path, Any]) -> None:
    folder, model = family
    prompts = prompts_of(6, seed=8)
    params = [SamplingParams(max_tokens=30, temperature=0.7, seed=100 + i) for i in range(len(prompts))]
    params[2] = SamplingParams(max_tokens=30)
    params[3] = SamplingParams(max_tokens=30, temperature=0.7, seed=3, repetition_penalty=1.2, logit_bias={3: -100})
    plain = run(engine_for(folder, "none", "ar"), prompts, params, None)
    comparison = Comparison()
    for drafter in ("lookup", "{}+lookup"):
        engine = engine_for(folder, drafter, "joint")
        for scope in (None, "same", "same", "other"):
            outs = run(engine, prompts, params, scope)
            for prompt, one, out, reference in zip(prompts, params, outs, plain, strict=True):
                if one.logit_bias:
                    assert out.token_ids == reference.token_ids
                else:
                    comparison.same(model, prompt, out.token_ids, reference.token_ids, one.temperature, one.seed or 0)
    comparison.check()


def test_the_embedded_target_writes_the_same_with_every_source() -> None:
    """A copy, an answer that repeats an earlier row's, and a chat, in float32 against plain decoding."""
    text = "The library opens at nine. Students come to read the papers, and teachers help them with their homework."
    prompts: list[Any] = [
        [{"role": "user", "content": f"Repeat this text exactly:\n\n{text}"}],
        [{"role": "user", "content": "Name three colours."}],
        [{"role": "user", "content": "Name three colours."}],
    ]
    params = SamplingParams(max_tokens=32)
    settings: dict[str, Any] = {"dtype": "float32", "prefix_cache": False, "kv_cache_tokens": 4096, "max_batch_size": 2}
    engine = Engine(EngineConfig(drafter="embedded+lookup", width="fixed:15", **settings))
    outs = engine.generate(prompts, params)
    engine.use_policy(FixedWidth("ar", 0, branching=False))
    plain = engine.generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    copied, _, again = (out.stats for out in outs)
    assert copied.accepted_by_source["prompt"] > 10
    assert copied.mean_round_length > 4
    assert again.accepted_by_source.get("rows", 0) > 0
