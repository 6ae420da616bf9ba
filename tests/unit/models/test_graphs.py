"""Captured forwards, replayed on the CPU under the rules of a CUDA graph, against the plain forward."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig

from cast_ray.models.attention.base import Step
from cast_ray.models.attention.flashinfer import FlashInferBackend
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.flatten import PromptChunk, Roots, flatten_trees, make_step
from cast_ray.models.graphs import TargetGraphs, pad_group
from cast_ray.models.loading import load_target
from cast_ray.models.recordings import Limits
from cast_ray.models.target import ATTENTION_NAME, Target
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import no_tree
from cast_ray.width.buckets import Buckets
from tests.support import TINY, qwen3, save_tiny_model
from tests.unit.models.attention import interpreter

PAGE, PAGES = 4, 90
GEMMA = {**TINY, "sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": None}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
OSS = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
CONFIGS = {
    "qwen3": qwen3(),
    "windows": qwen3(**WINDOWS),
    "softcap": Gemma2Config(**GEMMA),
    "sinks and experts": GptOssConfig(**OSS),
}


def target_of(folder: Path, config: Any, flashinfer: bool = False) -> Target:
    save_tiny_model(folder, config, spread=2.0)
    loaded = load_target(str(folder), torch.float32, torch.device("cpu"), attn_implementation=ATTENTION_NAME)
    cpu = torch.device("cpu")
    backend = FlashInferBackend(PAGE, cpu, interpreter, split_from=12) if flashinfer else SdpaBackend(PAGE)
    return Target(loaded, backend, PAGES * PAGE, taps=(0, 2))


def random_roots(target: Target, contexts: list[int]) -> Roots:
    """Requests on scattered pages, with prompts in the cache; all else there is no number."""
    batch = len(contexts)
    tables = torch.randperm(PAGES)[: batch * 10].view(batch, 10)
    target.cache.data[:, :, : target.cache.slots].fill_(float("nan"))
    chunks = [
        PromptChunk(torch.randint(12, (n,)).tolist(), 0, table) for n, table in zip(contexts, tables, strict=True) if n
    ]
    if chunks:
        target.forward(make_step(None, chunks, PAGE), torch.zeros(0, dtype=torch.int64))
    return Roots(torch.randint(12, (batch,)), torch.tensor(contexts), contexts, tables)


def random_step(roots: Roots, widths: list[int]) -> Step:
    batch, most = len(widths), max(widths)
    tree = no_tree(batch, torch.device("cpu"))
    if most:
        scores = torch.randn(batch, 4, 5).log_softmax(-1)
        tree = pack(DraftScores(scores, torch.arange(5).expand(batch, 4, 5).contiguous()), most)
    return make_step(flatten_trees(roots, tree, widths, PAGE, 511), [], PAGE)


@pytest.mark.parametrize("flashinfer", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_captured_forwards_equal_plain_ones(tmp_path: Path, name: str, flashinfer: bool) -> None:
    torch.manual_seed(5)
    chosen = random.Random(5)
    target = target_of(tmp_path, CONFIGS[name], flashinfer)
    graphs = TargetGraphs(target, Buckets((1, 2, 4, 8, 16, 24, 32, 64), (1, 2, 4, 6)))
    replays = 0
    for batch in (1, 3, 1, 5, 2, 3, 4):
        contexts = [chosen.choice([0, 1, 5, 13, 22]) for _ in range(batch)]
        roots = random_roots(target, contexts)
        for widths in ([0] * batch, [chosen.randrange(9) for _ in range(batch)], [7] * batch):
            step = random_step(roots, widths)
            rows = torch.arange(step.tokens.shape[0])
            plain = target.forward(step, rows)
            written = target.cache.data[:, :, step.slots].clone()
            target.cache.data[:, :, step.slots] = float("nan")
            found = graphs.run(step, rows)
            assert found is not None
            assert found.features is not None
            assert plain.features is not None
            torch.testing.assert_close(found.logits, plain.logits, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.features, plain.features, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(target.cache.data[:, :, step.slots], written, atol=1e-4, rtol=1e-4)
            replays += 1
    report = graphs.report()
    assert report["replays"] == replays
    assert report["off"] is None
    # Unlike sizes share recordings: that is what buckets are for.
    assert report["recorded"] < replays


@torch.inference_mode()
def test_the_target_takes_a_captured_forward_where_there_is_one(tmp_path: Path) -> None:
    torch.manual_seed(6)
    target = target_of(tmp_path, qwen3())
    roots = random_roots(target, [9, 4])
    step = random_step(roots, [5, 2])
    plain = target.forward(step, torch.arange(9))
    target.graphs = TargetGraphs(target, Buckets.up_to(16, 2))
    torch.testing.assert_close(target.forward(step, torch.arange(9)).logits, plain.logits, atol=1e-4, rtol=1e-4)
    assert target.graphs.report()["replays"] == 1
    # Too large for a bucket, logits of some rows only, and prompt chunks: eager.
    target.forward(random_step(roots, [9, 9]), torch.arange(20))
    target.forward(step, torch.arange(3))
    target.forward(make_step(None, [PromptChunk([1, 2], 9, roots.tables[0])], PAGE), torch.arange(2))
    assert target.graphs.report()["replays"] == 1


def test_padding_keeps_requests_and_adds_segments_of_one_cached_token(tmp_path: Path) -> None:
    roots = random_roots(target_of(tmp_path, qwen3()), [3, 7])
    group = random_step(roots, [4, 1]).groups[0]
    padded = pad_group(group, 16, 4, page=77)
    assert padded.lengths == [5, 2, 5, 4]
    assert padded.contexts == [3, 7, 1, 1]
    assert padded.tables[:2].equal(group.tables)
    assert (padded.tables[2:] == 77).all()
    assert padded.mask is not None
    assert group.mask is not None
    assert padded.positions.shape == (4, 8)
    assert padded.mask.shape == (4, 8, 8)
    assert padded.mask[:2, :5, :5].equal(group.mask)
    # No rows to spare, but fewer requests than the bucket has: their segments are empty.
    assert pad_group(group, 7, 4, page=77).lengths == [5, 2, 0, 0]


@torch.inference_mode()
def test_warming_up_records_small_buckets_first_and_stops_at_its_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_of(tmp_path, qwen3())
    before = target.cache.data[:, :, : target.cache.slots].zero_().clone()
    graphs = TargetGraphs(target, Buckets((1, 2, 4, 8), (1, 2)))
    graphs.warm_up(widest=4)
    # (1,1) (2,1) (2,2) (4,1) (4,2) (8,2)
    assert graphs.report()["recorded"] == 6
    assert target.cache.data[:, :, : target.cache.slots].equal(before)
    with caplog.at_level(logging.INFO):
        few = TargetGraphs(target, Buckets((1, 2, 4, 8), (1, 2)), Limits(most=2))
        few.warm_up(widest=4)
        hurried = TargetGraphs(target, Buckets((1, 2, 4, 8), (1, 2)), Limits(seconds=0.0))
        hurried.warm_up(widest=4)
    assert few.report()["recorded"] == 2
    assert "as many as are allowed" in few.report()["off"]
    assert "of 6 sizes recorded in 0 s" in caplog.text
    roots = random_roots(target, [3])
    assert few.run(random_step(roots, [1]), torch.arange(2)) is not None
    assert few.run(random_step(roots, [7]), torch.arange(8)) is None


@torch.inference_mode()
def test_a_model_whose_host_reads_values_runs_eagerly_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_of(tmp_path, qwen3())
    target.model.get_decoder().layers[1].register_forward_hook(lambda *given: bool(given[-1].sum() > 0) or None)
    step = random_step(random_roots(target, [5]), [3])
    plain = target.forward(step, torch.arange(4))
    target.graphs = TargetGraphs(target, Buckets.up_to(16, 2))
    assert target.forward(step, torch.arange(4)).logits.equal(plain.logits)
    assert "waits for values" in target.graphs.report()["off"]
    assert "it runs eagerly" in caplog.text
