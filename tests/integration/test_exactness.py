"""The embedded pair in float32 against Hugging Face's own decoding, over five domains of public prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.models.loading import LoadedTarget, load_target
from tests.support import Comparison, reference_greedy

POLICIES = ("ar", "chain", "fixed:7", "fixed:63", "deployment", "joint")
PROMPTS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
ONE_A_DOMAIN = PROMPTS[::4]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("embedded", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {width: Engine(EngineConfig(width=width, dtype="float32", max_batch_size=20)) for width in POLICIES}


def greedy_references(
    target: LoadedTarget, rows: list[dict[str, Any]], max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    pairs = []
    for row in rows:
        prompt = target.tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        pairs.append((prompt, reference_greedy(target.model, prompt, max_tokens, target.eos_token_ids)))
    return pairs


def check_greedy(target: LoadedTarget, engines: dict[str, Engine], rows: list[dict[str, Any]], max_tokens: int) -> None:
    references = greedy_references(target, rows, max_tokens)
    params = SamplingParams(max_tokens=max_tokens)
    for width, engine in engines.items():
        comparison = Comparison()
        together = engine.generate([row["messages"] for row in rows], params)
        for row, (prompt, reference), out in zip(rows, references, together, strict=True):
            alone = engine.generate([row["messages"]], params)[0]
            comparison.same(target.model, prompt, alone.token_ids, reference)
            comparison.same(target.model, prompt, out.token_ids, reference)
        comparison.check()
        engine.check_integrity()
        print(f"{width}: {comparison.tokens} tokens compared, {comparison.ties} near-ties")


def check_sampled(
    target: LoadedTarget, engines: dict[str, Engine], rows: list[dict[str, Any]], max_tokens: int
) -> None:
    params = [SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=17 + i) for i in range(len(rows))]
    reference = engines["ar"].generate([row["messages"] for row in rows], params)
    comparison = Comparison()
    for width, engine in engines.items():
        together = engine.generate([row["messages"] for row in rows], params)
        for number, row in enumerate(rows):
            prompt = engine.render(row["messages"])
            alone = (
                engine.generate([row["messages"]], params[number])[0]
                if width != "ar" or number < 2
                else together[number]
            )
            for out in (alone, together[number]):
                comparison.same(
                    target.model, prompt, out.token_ids, reference[number].token_ids, 0.8, params[number].seed or 0
                )
    comparison.check()
    print(f"sampled: {comparison.tokens} tokens compared, {comparison.ties} near-ties")


def test_greedy_tokens_are_those_of_generate_at_every_width_and_batch(
    target: LoadedTarget, engines: dict[str, Engine]
) -> None:
    check_greedy(target, engines, ONE_A_DOMAIN, 24)


def test_sampled_tokens_are_the_same_at_every_width_and_batch(target: LoadedTarget, engines: dict[str, Engine]) -> None:
    check_sampled(target, engines, ONE_A_DOMAIN, 24)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_prompts_greedy(target: LoadedTarget, engines: dict[str, Engine]) -> None:
    check_greedy(target, engines, PROMPTS, 64)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_prompts_sampled(target: LoadedTarget, engines: dict[str, Engine]) -> None:
    check_sampled(target, engines, PROMPTS, 64)
