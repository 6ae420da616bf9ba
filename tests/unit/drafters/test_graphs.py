"""A captured proposal, replayed on the CPU under the rules of a CUDA graph, against the plain one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import DFlashDrafter, load_dflash
from cast_ray.drafters.graphs import DraftGraphs
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.kv_cache import slots_of
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from cast_ray.width.buckets import Buckets
from tests.support import dflash2_block, qwen3, save_tiny_drafter, save_tiny_model

PAGE, PAGES = 4, 300
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "sliding": SLIDING,
    "dflash2": {"dflash_config": dflash2_block()},
}


def drafters_of(folder: Path, changes: dict[str, Any]) -> tuple[Target, DFlashDrafter, DFlashDrafter]:
    save_tiny_model(folder / "target", qwen3(), spread=2.0)
    save_tiny_drafter(folder / "drafter", target=qwen3(), **changes)
    config = read_config(folder / "drafter")
    cpu = torch.device("cpu")
    loaded = load_target(str(folder / "target"), torch.float32, cpu, attn_implementation=ATTENTION_NAME)
    target = Target(loaded, SdpaBackend(PAGE), PAGES * PAGE, taps=config.taps)
    plain, captured = (load_dflash(folder / "drafter", config, target, PAGES * PAGE, PAGE) for _ in range(2))
    return target, plain, captured


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_captured_proposals_equal_plain_ones(tmp_path: Path, name: str) -> None:
    torch.manual_seed(8)
    chosen = random.Random(8)
    target, plain, captured = drafters_of(tmp_path, DRAFTERS[name])
    captured.graphs = DraftGraphs(captured, target, Buckets((8,), (1, 2, 4)))
    for drafter in (plain, captured):
        drafter.cache.data[:, :, : drafter.cache.slots].fill_(float("nan"))
    tables = torch.randperm(PAGES).view(5, 60)
    lengths = [0] * 5
    proposals = 0
    for batch, most in [(1, 3), (3, 4), (2, 1), (4, 5), (3, 100), (3, 4), (1, 0), (5, 2), (4, 3)]:
        grown = [max(lengths[b] == 0, chosen.randint(min(1, most), most)) for b in range(batch)]
        # Tokens of a prompt, or of a round, enter the contexts.
        places = [torch.arange(lengths[b], lengths[b] + n) for b, n in enumerate(grown)]
        slots = torch.cat([slots_of(tables[b : b + 1], place[None], PAGE)[0] for b, place in enumerate(places)])
        features = torch.randn(slots.shape[0], len(plain.taps) * target.hidden_size)
        for drafter in (plain, captured):
            drafter.observe(features, slots, torch.cat(places))
        lengths = [n + (grown[b] if b < batch else 0) for b, n in enumerate(lengths)]
        now = lengths[:batch]
        warm = None if proposals % 2 else torch.tensor([0.0, 0.7, 1.3, 0.0, 1.0])[:batch]
        contexts = DraftContexts(torch.randint(12, (batch,)), now, torch.tensor(now), tables[:batch], warm)
        expected, found = plain.propose(contexts, 6), captured.propose(contexts, 6)
        proposals += batch <= 4  # beyond four requests there is no bucket
        assert captured.graphs.report()["replays"] == proposals
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
        assert found.token_ids.equal(expected.token_ids)
        assert (found.pairwise is None) == (expected.pairwise is None)
        if found.pairwise is not None:
            torch.testing.assert_close(found.pairwise, expected.pairwise, atol=1e-4, rtol=1e-4)
        for b, length in enumerate(now):
            own = slots_of(tables[b : b + 1], torch.arange(length)[None], PAGE)[0]
            kept = [drafter.cache.data[:, :, own] for drafter in (captured, plain)]
            torch.testing.assert_close(*kept, atol=1e-4, rtol=1e-4)
    assert captured.graphs.report()["off"] is None
    assert captured.graphs.report()["recorded"] < proposals
