"""Losslessness on small random models of several families, whose few tokens make trees hit often."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from cast_ray import Completion, Engine, EngineConfig, SamplingParams
from tests.support import TINY, Comparison, qwen3, reference_greedy, save_tiny_drafter, save_tiny_model

FAMILIES: dict[str, Any] = {
    "qwen3": lambda: qwen3(),
    "llama": lambda: LlamaConfig(**TINY),
    "mistral_sliding": lambda: MistralConfig(**TINY, sliding_window=9),
    "qwen3_moe": lambda: Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gemma2_softcap": lambda: Gemma2Config(
        **TINY, sliding_window=9, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=8.0
    ),
    "gemma3_sliding": lambda: Gemma3TextConfig(**TINY, sliding_window=9, query_pre_attn_scalar=8),
    "gpt_oss_sinks": lambda: GptOssConfig(
        **TINY,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
POLICIES = ("ar", "chain", "fixed:7", "fixed:31", "deployment", "round", "joint")


def prompts_of(count: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(12) for _ in range(rng.choice([1, 2, 5, 17, 40]))] for _ in range(count)]


def engine_for(folder: Path, drafter: Path, width: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "target": str(folder),
        "drafter": str(drafter),
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


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param]()
    save_tiny_model(folder / "target", config, spread=2.0)
    save_tiny_drafter(folder / "drafter", target=config)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    return folder / "target", folder / "drafter", model.eval()


def test_greedy_output_is_that_of_generate_at_every_width_and_batch(family: tuple[Path, Path, Any]) -> None:
    folder, drafter, model = family
    prompts = prompts_of(7)
    references = [reference_greedy(model, prompt, 40) for prompt in prompts]
    comparison = Comparison()
    accepted = 0
    for width in POLICIES:
        engine = engine_for(folder, drafter, width)
        alone = [engine.generate([prompt], SamplingParams(max_tokens=40))[0] for prompt in prompts[:3]]
        together = engine.generate(prompts, SamplingParams(max_tokens=40))
        engine.check_integrity()
        for outs in (alone, together):
            for prompt, reference, out in zip(prompts, references, outs, strict=False):
                comparison.same(model, prompt, out.token_ids, reference)
        if width != "ar":
            accepted += sum(out.stats.tokens_committed - out.stats.rounds for out in together)
    comparison.check()
    # The promise is about accepted paths: there must have been many of them.
    assert accepted > 100


def test_sampled_output_is_the_same_at_every_width_and_batch(family: tuple[Path, Path, Any]) -> None:
    folder, drafter, model = family
    prompts = prompts_of(6, seed=8)
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=100 + i) for i in range(len(prompts))]
    params[2] = SamplingParams(max_tokens=30)  # a greedy one among them
    by_width: dict[str, list[Completion]] = {}
    comparison = Comparison()
    for width in POLICIES:
        engine = engine_for(folder, drafter, width)
        by_width[width] = engine.generate(prompts, params)
        alone = engine.generate([prompts[1]], [params[1]])[0]
        comparison.same(model, prompts[1], alone.token_ids, by_width["ar"][1].token_ids, 0.8, 101)
    for width in POLICIES[1:]:
        for prompt, p, out, reference in zip(prompts, params, by_width[width], by_width["ar"], strict=True):
            comparison.same(model, prompt, out.token_ids, reference.token_ids, p.temperature, p.seed or 0)
    comparison.check()
    outputs = {tuple(out.token_ids) for out in by_width["ar"]}
    assert len(outputs) == len(prompts)
