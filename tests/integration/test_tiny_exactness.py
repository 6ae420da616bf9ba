"""Losslessness on small random models of several families, whose few tokens make trees hit often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cast_ray import Completion, SamplingParams
from tests import families
from tests.support import (
    Comparison,
    reference_greedy,
    save_tiny_drafter,
    save_tiny_model,
    tiny_engine,
    tiny_prompts,
)

POLICIES = ("ar", "chain", "fixed:7", "fixed:31", "deployment", "round", "joint")


@pytest.fixture(scope="module", params=families.MAIN)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    config = families.MAIN[request.param]()
    save_tiny_model(folder / "target", config, spread=2.0)
    save_tiny_drafter(folder / "drafter", target=config)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    return folder / "target", folder / "drafter", model.eval()


def test_greedy_output_is_that_of_generate_at_every_width_and_batch(family: tuple[Path, Path, Any]) -> None:
    folder, drafter, model = family
    prompts = tiny_prompts(7)
    references = [reference_greedy(model, prompt, 40) for prompt in prompts]
    comparison = Comparison()
    accepted = 0
    for width in POLICIES:
        engine = tiny_engine(folder, drafter, width)
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
    prompts = tiny_prompts(6, seed=8)
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=100 + i) for i in range(len(prompts))]
    params[2] = SamplingParams(max_tokens=30)  # a greedy one among them
    by_width: dict[str, list[Completion]] = {}
    comparison = Comparison()
    for width in POLICIES:
        engine = tiny_engine(folder, drafter, width)
        by_width[width] = engine.generate(prompts, params)
        alone = engine.generate([prompts[1]], [params[1]])[0]
        comparison.same(model, prompts[1], alone.token_ids, by_width["ar"][1].token_ids, 0.8, 101)
    for width in POLICIES[1:]:
        for prompt, p, out, reference in zip(prompts, params, by_width[width], by_width["ar"], strict=True):
            comparison.same(model, prompt, out.token_ids, reference.token_ids, p.temperature, p.seed or 0)
    comparison.check()
    outputs = {tuple(out.token_ids) for out in by_width["ar"]}
    assert len(outputs) == len(prompts)
