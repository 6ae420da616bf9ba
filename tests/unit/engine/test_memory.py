"""How free memory is shared out: the pool, one step's work, captured forwards; and what is said when it is short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cast_ray.config import EngineConfig
from cast_ray.engine import memory
from cast_ray.errors import ModelError

GIB = 1 << 30
QWEN3_8B = SimpleNamespace(hidden_size=4096, intermediate_size=12288, vocab_size=151936)
A30B = SimpleNamespace(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts_per_tok=8, vocab_size=151936
)
PER_TOKEN = 36 * 2 * 8 * 128 * 2
CUDA = torch.device("cuda", 0)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    def let(size: int) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda device: size)
        monkeypatch.setattr(memory, "total_memory", lambda device: 140 * GIB)

    return let


def budget(config: EngineConfig, device: torch.device = CUDA, text: Any = QWEN3_8B, **changes: Any) -> memory.Budget:
    about = {"max_context": 40960, "scratch": 64, "bytes_per_token": PER_TOKEN, "dtype": torch.bfloat16, **changes}
    return memory.share_out(config, text, device=device, **about)


def test_a_gpu_gives_the_pool_what_work_and_graphs_leave(free: Any) -> None:
    free(120 * GIB)
    config = EngineConfig(max_batch_size=128)
    found = budget(config)
    left = 0.9 * 120 * GIB - found.graph_bytes - memory.step_bytes(config, QWEN3_8B, torch.bfloat16)
    size = found.num_pages * config.page_size * PER_TOKEN
    assert left - config.page_size * PER_TOKEN < size <= left
    assert found.graph_bytes == 4 * GIB
    later = budget(config, later=10 * GIB)
    assert 8.9 * GIB < size - later.num_pages * config.page_size * PER_TOKEN < 9.1 * GIB


def test_a_pool_is_no_larger_than_can_be_used(free: Any) -> None:
    free(120 * GIB)
    config = EngineConfig(max_batch_size=2)
    assert budget(config, max_context=1000).num_pages == 2 * (1000 + 64) // config.page_size


def test_graphs_take_less_of_a_small_gpu(free: Any) -> None:
    free(8 * GIB)
    assert budget(EngineConfig()).graph_bytes == GIB


def test_a_cpu_gives_a_quarter_or_what_is_asked_for(free: Any) -> None:
    free(8 * GIB)
    cpu = torch.device("cpu")
    config = EngineConfig(max_batch_size=64)
    quarter = budget(config, cpu)
    assert quarter == memory.Budget(2 * GIB // PER_TOKEN // config.page_size, 0)
    assert budget(config.replace(memory_share=0.5), cpu).num_pages == pytest.approx(2 * quarter.num_pages, abs=1)


def test_too_little_memory_is_said_with_the_numbers(free: Any) -> None:
    free(3 * GIB)
    with pytest.raises(ModelError, match=r"too few for one request.*cuda:0 has 3\.2 GB free of 150\.3 GB.*GB are for"):
        budget(EngineConfig(max_step_tokens=4096))
    free(20 * GIB)
    with pytest.raises(ModelError, match=r"kv_cache_tokens=200000: 29\.5 GB.*cuda:0 has 21\.5 GB free.*Use at most"):
        budget(EngineConfig(kv_cache_tokens=200_000))


def test_a_step_counts_the_experts_that_work_and_the_logits() -> None:
    config = EngineConfig(max_step_tokens=512)
    dense = memory.step_bytes(config, QWEN3_8B, torch.bfloat16)
    logits = 512 * 4 * 4 * 151936
    assert logits < dense - memory.OTHER_BYTES < 1.2 * logits
    assert memory.step_bytes(config, A30B, torch.bfloat16) < dense
    assert memory.step_bytes(config.replace(max_step_tokens=1024), QWEN3_8B, torch.bfloat16) > 1.5 * dense - GIB
