"""Whole models over the FlashInfer backend, its kernels interpreted: logits and tokens are those with SDPA."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import load_dflash
from cast_ray.engine import setup
from cast_ray.models.attention.base import AttentionBackend
from cast_ray.models.attention.choose import Choice
from cast_ray.models.attention.flashinfer import FlashInferBackend
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.flatten import PromptChunk, Roots, flatten_trees, make_step
from cast_ray.models.graphs import TargetGraphs
from cast_ray.models.loading import LoadedTarget, load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import no_tree
from cast_ray.width.buckets import Buckets
from tests.families import MIXED, of
from tests.support import qwen3, save_tiny_drafter, save_tiny_model
from tests.unit.models.attention import interpreter

CPU = torch.device("cpu")
PAGE, PAGES = 4, 64
FAMILIES = {
    "grouped heads": of("qwen3"),
    "windows and soft caps": of("gemma2", **MIXED, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
    "windows": of("gemma3_text", **MIXED, query_pre_attn_scalar=8),
    "sinks": of("gpt_oss", **MIXED, num_local_experts=4, num_experts_per_tok=2),
}


def flashinfer(**options: Any) -> FlashInferBackend:
    return FlashInferBackend(PAGE, CPU, interpreter, **options)


def target_on(backend: AttentionBackend, loaded: LoadedTarget) -> Target:
    target = Target(loaded, backend, PAGES * PAGE, taps=(0, 2))
    target.cache.data[:, :, : target.cache.slots].fill_(float("nan"))
    return target


def a_round(target: Target, contexts: list[int], widths: list[int]) -> torch.Tensor:
    """Logits of trees behind prompts, and of a chunk beside them, `[rows, vocab]`."""
    torch.manual_seed(1)
    tables = torch.randperm(PAGES).view(4, 16)
    none = torch.zeros(0, dtype=torch.int64)
    for context, table in zip(contexts, tables, strict=False):
        # Two chunks: the second looks back at the first.
        half = context // 2
        prompt = torch.randint(12, (context,)).tolist()
        chunks = [PromptChunk(prompt[:half], 0, table), PromptChunk(prompt[half:], half, table)]
        for chunk in chunks:
            target.forward(make_step(None, [chunk], PAGE), none)
    batch = len(contexts)
    roots = Roots(torch.randint(12, (batch,)), torch.tensor(contexts), contexts, tables[:batch])
    scores = DraftScores(torch.randn(batch, 4, 5).log_softmax(-1), torch.arange(5).expand(batch, 4, 5).contiguous())
    trees = flatten_trees(roots, pack(scores, max(widths)), widths, PAGE, 511)
    step = make_step(trees, [PromptChunk(torch.randint(12, (9,)).tolist(), 0, tables[3])], PAGE)
    return target.forward(step, torch.arange(step.tokens.shape[0])).logits


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_logits_equal_those_with_sdpa(name: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, FAMILIES[name](), spread=2.0)
    loaded = load_target(str(tmp_path), torch.float32, CPU, attn_implementation=ATTENTION_NAME)
    contexts, widths = [23, 14, 30], [9, 0, 5]
    expected = a_round(target_on(SdpaBackend(PAGE), loaded), contexts, widths)
    for options in ({}, {"split_from": 0}, {"joined": True}):
        found = a_round(target_on(flashinfer(**options), loaded), contexts, widths)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


DRAFTERS: dict[str, dict[str, Any]] = {
    "both ways": {},
    "causal": {"is_causal": True},
    "windows narrower than a block": {
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
        "is_causal": False,
    },
}


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_a_drafter_attends_through_it_too(name: str, tmp_path: Path) -> None:
    config = qwen3()
    save_tiny_model(tmp_path / "target", config, spread=2.0)
    save_tiny_drafter(tmp_path / "drafter", target=config, **DRAFTERS[name])
    loaded = load_target(str(tmp_path / "target"), torch.float32, CPU, attn_implementation=ATTENTION_NAME)
    answers = []
    for backend in (SdpaBackend(PAGE), flashinfer()):
        torch.manual_seed(2)
        folder = tmp_path / "drafter"
        drafter = load_dflash(folder, read_config(folder), target_on(backend, loaded), PAGES * PAGE, PAGE)
        tables = torch.randperm(PAGES).view(2, 32)
        for b, context in enumerate((21, 6)):
            index = torch.arange(context)
            slots = tables[b, index // PAGE] * PAGE + index % PAGE
            drafter.observe(torch.randn(context, 2 * config.hidden_size), slots, index)
        contexts = DraftContexts(torch.tensor([3, 4]), [21, 6], torch.tensor([21, 6]), tables, None)
        answers.append(drafter.block_logits(contexts))
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("split_from", [None, 16])
@torch.inference_mode()
def test_captured_forwards_run_on_it(split_from: int | None, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, FAMILIES["windows"](), spread=2.0)
    loaded = load_target(str(tmp_path), torch.float32, CPU, attn_implementation=ATTENTION_NAME)
    plain, captured = target_on(SdpaBackend(PAGE), loaded), target_on(flashinfer(split_from=split_from), loaded)
    captured.graphs = TargetGraphs(captured, Buckets((1, 2, 4, 8, 16, 32), (1, 2, 4, 6)))
    torch.manual_seed(3)
    tables = torch.randperm(PAGES).view(4, 16)
    rounds = ([5, 9, 2], [4, 4, 4]), ([21, 3, 14], [9, 0, 6]), ([7, 30, 8], [0, 0, 0]), ([5, 1], [3, 7])
    for contexts, widths in rounds:
        batch = len(contexts)
        roots = Roots(torch.randint(12, (batch,)), torch.tensor(contexts), contexts, tables[:batch])
        scores = DraftScores(torch.randn(batch, 4, 5).log_softmax(-1), torch.arange(5).expand(batch, 4, 5).contiguous())
        tree = pack(scores, max(widths)) if max(widths) else no_tree(batch, CPU)
        answers = []
        for target in (plain, captured):
            chunks = [PromptChunk([i % 12 for i in range(n)], 0, t) for n, t in zip(contexts, tables, strict=False)]
            target.forward(make_step(None, chunks, PAGE), torch.zeros(0, dtype=torch.int64))
            step = make_step(flatten_trees(roots, tree, widths, PAGE, 511), [], PAGE)
            answers.append(target.forward(step, torch.arange(step.tokens.shape[0])).logits.clone())
        torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)
    report = captured.graphs.report()
    assert report["off"] is None
    assert report["replays"] == 4


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_an_engine_on_it_writes_the_same_tokens(
    graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = qwen3()
    save_tiny_model(tmp_path / "target", config, spread=2.0)
    save_tiny_drafter(tmp_path / "drafter", target=config)
    folders = {"target": str(tmp_path / "target"), "drafter": str(tmp_path / "drafter")}
    settings = EngineConfig(**folders, width="fixed:9", dtype="float32", device="cpu", page_size=PAGE, max_nodes=9)
    prompts = [[1, 2, 3], [4] * 30, [5, 6]]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    with caplog.at_level(logging.INFO):
        plain = Engine(settings)
    assert "attention: sdpa (FlashInfer runs on CUDA" in caplog.text
    monkeypatch.setattr(setup, "choose_backend", lambda *_: Choice(flashinfer(), "flashinfer", "interpreted"))
    engine = Engine(settings.replace(graphs=graphs, graph_seconds=0.0))
    assert engine.stats()["attention"] == {"backend": "flashinfer", "reason": "interpreted"}
    ours, theirs = (one.generate(prompts, params) for one in (engine, plain))
    assert [out.token_ids for out in ours] == [out.token_ids for out in theirs]
    for recorded in (engine._parts.target.graphs, getattr(engine._parts.drafter, "graphs", None)):
        assert (recorded is not None) == (graphs == "on")
        if recorded is not None:
            report = recorded.report()
            assert report["off"] is None
            assert report["replays"] > 5
