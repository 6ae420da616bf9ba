"""The backend through FlashInfer's own Python code, where it is installed: all of it but the CUDA kernel, which the
interpreter stands in for. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cast_ray.models.attention.base import Group
from cast_ray.models.attention.flashinfer import FlashInferBackend
from tests.unit.models.attention import interpreter
from tests.unit.models.attention.test_flashinfer import CPU, LAYERS, PAGE, a_cache, a_round, agree, fill_cache, trees

prefill = pytest.importorskip("flashinfer.prefill")


class Kernels:
    """What FlashInfer compiles: `plan` schedules, `paged_run` computes."""

    def plan(self, *arguments: Any) -> list[int]:
        return [0] * 15

    def paged_run(self, *arguments: Any) -> None:
        q, k, v, rows, pages, indices, last, out, lse, mode, _, window, _, mask, starts = arguments[3:18]
        cap, scale = arguments[22:24]
        assert (mode == prefill.MaskMode.CUSTOM.value) == (mask is not None)
        kernel = interpreter.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), backend="fa2")
        kernel._qo_indptr_buf, kernel._paged_kv_indptr_buf = rows, pages
        kernel._paged_kv_indices_buf, kernel._paged_kv_last_page_len_buf = indices, last
        kernel._custom_mask_buf, kernel._mask_indptr_buf = mask, starts
        kernel.causal, kernel.window_left = mode == prefill.MaskMode.CAUSAL.value, window
        kernel.scale, kernel.soft_cap = scale, cap
        kernel.heads, kernel.shape, kernel.dtypes = q.shape[1], tuple(k.shape[1:]), (q.dtype, k.dtype)
        _, sums = kernel.run(q, (k, v), out=out, return_lse=True)
        if lse is not None:
            lse.copy_(sums)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashInfer with nothing in it that asks for a GPU."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **about: empty(*shape, **about))
    monkeypatch.setattr(prefill, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", lambda *_: Kernels())
    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=prefill.BatchPrefillWithPagedKVCacheWrapper,
        merge_state_in_place=interpreter.merge_state_in_place,
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("split_from", [None, 0])
@pytest.mark.parametrize("joined", [False, True])
def test_eager_plans_agree_with_sdpa(name: str, split_from: int | None, joined: bool, package: Any) -> None:
    groups, cache = a_round()
    if not LAYERS[name].causal:
        groups = [Group(0, [5, 5], [9, 2], torch.randperm(24).view(2, 12), torch.tensor([range(9, 14), range(2, 7)]))]
        cache = a_cache(24)
        fill_cache(cache, groups)
    backend = FlashInferBackend(PAGE, CPU, package, split_from=split_from, joined=joined)
    for _ in range(2):  # the second plans anew in the wrappers of the first
        agree(backend, groups, cache, LAYERS[name])


@pytest.mark.parametrize("name", ["plain", "window", "sinks everywhere"])
@pytest.mark.parametrize("split_from", [None, 0])
def test_captured_plans_agree_with_sdpa(name: str, split_from: int | None, package: Any) -> None:
    backend = FlashInferBackend(PAGE, CPU, package, split_from=split_from)
    tables, cache = torch.randperm(48).view(4, 12), a_cache(48)
    static = None
    for contexts, widths in (([13, 2, 0, 4], [9, 4, 6, 1]), ([1, 3, 22, 8], [5] * 4), ([27, 30, 2, 0], [0, 11, 1, 8])):
        group = trees(contexts, widths, tables[torch.randperm(4)])
        fill_cache(cache, [group])
        static = static or backend.reserve(group, cache)
        static.fill(group)
        agree(static, [group], cache, LAYERS[name], static.begin())
