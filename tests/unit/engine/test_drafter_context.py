"""The drafter's context is complete and right after every step, whatever mix of rounds, chunks and aborts led there.

Outputs cannot show this: a drafter that misses a part of its context only guesses worse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.drafters import dflash
from cast_ray.drafters.dflash import DFlashDrafter
from cast_ray.models import linear
from cast_ray.models.flatten import PromptChunk, make_step
from cast_ray.models.kv_cache import slots_of
from cast_ray.width.policy import FixedWidth
from cast_ray.width.shape import RoundShape
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PAGE = 4


class EveryOtherRound(FixedWidth):
    """Drafts in every other round, so that plain rounds leave features behind."""

    def __init__(self) -> None:
        super().__init__("fixed:12", 12, branching=True)
        self.asked = 0

    def drafts(self, shape: RoundShape) -> bool:
        self.asked += 1
        return self.asked % 2 == 0


class NeverDrafts(FixedWidth):
    """What a policy does where drafting does not pay."""

    def drafts(self, shape: RoundShape) -> bool:
        return False


def engine_of(folder: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "width": "fixed:12",
        "dtype": "float32",
        "device": "cpu",
        "page_size": PAGE,
        "max_batch_size": 3,
        "max_step_tokens": 16,
        "max_nodes": 12,
    }
    return Engine(EngineConfig(**{**settings, **changes}))


def drafter_of(engine: Engine) -> DFlashDrafter:
    drafter = engine._parts.drafter
    assert isinstance(drafter, DFlashDrafter)
    return drafter


@torch.inference_mode()
def context_at_once(engine: Engine, tokens: list[int]) -> Tensor:
    """Drafter keys and values of tokens `[layers, 2, n, kv_heads, dim]`, from one forward over all of them."""
    target, drafter = engine._parts.target, drafter_of(engine)
    table = torch.arange(-(-len(tokens) // PAGE))
    step = make_step(None, [PromptChunk(tokens, 0, table)], PAGE)
    features = target.forward(step, torch.empty(0, dtype=torch.int64)).features
    assert features is not None
    drafter.observe(features, step.slots, step.positions)
    drafter._write_context()
    return drafter.cache.data[:, :, step.slots]


@pytest.mark.parametrize("pending", [3, 1024])
def test_the_context_is_that_of_one_forward_over_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pending: int
) -> None:
    monkeypatch.setattr(dflash, "MAX_PENDING_ROWS", pending)
    save_tiny_model(tmp_path / "target", qwen3(), spread=2.0)
    save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    # So few pages that those of the aborted and the finished are soon another's.
    engine = engine_of(tmp_path, kv_cache_tokens=240)
    fresh = engine_of(tmp_path, width="chain")
    engine._rounds.policy = EveryOtherRound()
    # The later ones find pages of the earlier ones in the prefix cache, some of them while their features still wait.
    prompts = [[1], [(7 * i) % 12 for i in range(45)], [3, 4, 5], [2] * 20, [9, 8, 7, 6], [2] * 21, [2] * 17 + [4]]
    for number, prompt in enumerate(prompts):
        engine.submit(f"r{number}", prompt, SamplingParams(max_tokens=18))
    checked, steps = 0, 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == 5:
            assert engine.abort("r1") is not None
        drafter = drafter_of(engine)
        with torch.inference_mode():
            drafter._write_context()
        for sequence in engine._scheduler.running:
            if not sequence.cached:
                continue
            tables = engine._scheduler.tables[sequence.row : sequence.row + 1]
            slots = slots_of(tables, torch.arange(sequence.cached)[None], PAGE)[0]
            expected = context_at_once(fresh, sequence.tokens[: sequence.cached])
            torch.testing.assert_close(drafter.cache.data[:, :, slots], expected, atol=1e-4, rtol=1e-4)
            checked += sequence.cached
    assert checked > 500
    assert engine.stats()["prefix_tokens_reused"] >= 32


def test_plain_rounds_cost_the_drafter_nothing_but_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash, "MAX_PENDING_ROWS", 64)
    save_tiny_model(tmp_path / "target", qwen3())
    save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    engine = engine_of(tmp_path)
    engine.use_policy(NeverDrafts("fixed:12", 12, branching=True))
    drafter = drafter_of(engine)
    written: list[int] = []
    attention = drafter.network.layers[0].self_attn
    write_keys = attention.write_keys
    monkeypatch.setattr(
        attention, "write_keys", lambda rows, forward: (written.append(len(rows)), write_keys(rows, forward))
    )
    outs = engine.generate([[1, 2], [3], [4, 5]], SamplingParams(max_tokens=100))
    assert all(out.stats.rounds == 100 and out.stats.draft_rounds == 0 for out in outs)
    # Every committed token once, in few large writes.
    assert sum(written) + drafter._pending.count <= 302
    assert len(written) <= 302 // 60


def test_what_waits_for_a_request_that_left_is_not_written(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "target", qwen3())
    save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    drafter = drafter_of(engine_of(tmp_path))
    width = 2 * 32
    slots = torch.tensor([0, 1, 4, 5, 6, 8])  # pages 0, 1 and 2
    drafter.observe(torch.randn(6, width), slots, torch.arange(6))
    drafter.forget([1])
    with torch.inference_mode():
        drafter.cache.data.zero_()
        drafter._write_context()
    written = drafter.cache.data.abs().sum(dim=(0, 1, 3, 4)).nonzero()[:, 0]
    assert written.tolist() == [0, 1, 8]


def test_a_bfloat16_drafter_keeps_its_rotary_frequencies_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Elsewhere than on such a device only weights are kept in bfloat16.
    monkeypatch.setattr(linear, "computes_in_bfloat16", lambda device: True)
    save_tiny_model(tmp_path / "target", qwen3())
    save_tiny_drafter(tmp_path / "drafter", target=qwen3())
    exact, rounded = (drafter_of(engine_of(tmp_path, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert rounded.cache.data.dtype == torch.bfloat16
    assert torch.equal(rounded.network.rotary_emb.inv_freq, exact.network.rotary_emb.inv_freq)
    assert rounded.network.rotary_emb.inv_freq.dtype == torch.float32
