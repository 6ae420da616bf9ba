"""The FlashInfer backend through an interpreter of its plans, against SDPA in float32 and the real signatures."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cast_ray.errors import EngineError
from cast_ray.models.attention.base import CapturableBackend, Group, Layer
from cast_ray.models.attention.flashinfer import FlashInferBackend
from cast_ray.models.attention.packed_mask import mask_bytes, packed_mask
from cast_ray.models.attention.paging import halves, paged_arrays, whole
from cast_ray.models.attention.parts import visible_keys
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.attention.sections import Section, pays_to_split, sections_of
from cast_ray.models.attention.workspace import Bounds, workspace_bytes
from cast_ray.models.kv_cache import KVCache, slots_of
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import ancestor_mask
from tests.unit.models.attention import interpreter

CPU = torch.device("cpu")
PAGE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8
LAYERS = {
    "plain": Layer(0, 0.3),
    "window": Layer(1, 0.3, window=5),
    "window wider than a page": Layer(1, 0.3, window=11),
    "softcap": Layer(0, 0.3, softcap=2.0),
    "sinks": Layer(1, 0.3, window=7, sinks=torch.linspace(-1, 2, HEADS)),
    "sinks everywhere": Layer(0, 0.3, sinks=torch.linspace(-1, 2, HEADS)),
    "block": Layer(0, 0.3, causal=False),
    "block in a window": Layer(1, 0.3, causal=False, window=6),
    "block wider than its window": Layer(1, 0.3, causal=False, window=3),
}


class Counted(interpreter.BatchPrefillWithPagedKVCacheWrapper):
    made: list[Any] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)


@pytest.fixture
def kernels() -> Any:
    Counted.made.clear()
    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Counted, merge_state_in_place=interpreter.merge_state_in_place
    )


def a_cache(pages: int) -> KVCache:
    cache = KVCache(2, KV_HEADS, DIM, slots=pages * PAGE, dtype=torch.float32, device=CPU)
    cache.data.fill_(float("nan"))  # memory that nobody wrote must not matter
    return cache


def fill_cache(cache: KVCache, groups: list[Group]) -> None:
    for group in groups:
        for b, (length, context) in enumerate(zip(group.lengths, group.contexts, strict=True)):
            slots = slots_of(group.tables[b : b + 1], torch.arange(context + length)[None], PAGE)[0]
            for layer in range(2):
                cache.write(layer, slots, *torch.randn(2, context + length, KV_HEADS, DIM))


def trees(contexts: list[int], widths: list[int], tables: torch.Tensor, start: int = 0) -> Group:
    batch, most = len(widths), max(widths)
    depth = max(most, 1)
    scores = DraftScores(
        torch.randn(batch, depth, 5).log_softmax(-1), torch.arange(5).expand(batch, depth, 5).contiguous()
    )
    tree = pack(scores, most) if most else None
    if tree is None:
        positions, mask = torch.tensor(contexts)[:, None], torch.ones(batch, 1, 1, dtype=torch.bool)
    else:
        depths = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), tree.depths], 1)
        positions, mask = torch.tensor(contexts)[:, None] + depths, ancestor_mask(tree, most)
    return Group(start, [w + 1 for w in widths], contexts, tables, positions, mask)


def chunk(start: int, length: int, context: int, table: torch.Tensor) -> Group:
    return Group(start, [length], [context], table[None], torch.arange(context, context + length)[None])


def a_round(seed: int = 0) -> tuple[list[Group], KVCache]:
    """Trees of unlike width and context, and two prompt chunks, on shuffled pages."""
    torch.manual_seed(seed)
    tables = torch.randperm(84).view(7, 12)
    first = trees([13, 2, 0, 24], [9, 4, 6, 0], tables[:4])
    groups = [first, chunk(first.rows, 7, 3, tables[4]), chunk(first.rows + 7, 5, 20, tables[5])]
    cache = a_cache(84)
    fill_cache(cache, groups)
    return groups, cache


def agree(backend: Any, groups: list[Group], cache: KVCache, layer: Layer, plan: Any = None) -> None:
    rows = sum(group.rows for group in groups)
    queries = torch.randn(HEADS, rows, DIM).transpose(0, 1)  # strides as the model's
    reference = SdpaBackend(PAGE)
    expected = reference.run(reference.plan(groups, cache), queries, layer)
    out = backend.run(backend.plan(groups, cache) if plan is None else plan, queries, layer)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("split_from", [None, 0])
@pytest.mark.parametrize("joined", [False, True])
def test_trees_and_chunks_agree_with_sdpa(name: str, split_from: int | None, joined: bool, kernels: Any) -> None:
    if not LAYERS[name].causal:
        groups = [Group(0, [5, 5], [9, 2], torch.randperm(24).view(2, 12), torch.tensor([range(9, 14), range(2, 7)]))]
        cache = a_cache(24)
        fill_cache(cache, groups)
    else:
        groups, cache = a_round()
    agree(FlashInferBackend(PAGE, CPU, kernels, split_from=split_from, joined=joined), groups, cache, LAYERS[name])


def test_a_plan_is_made_once_a_forward_for_each_kind_of_layer(kernels: Any) -> None:
    backend = FlashInferBackend(PAGE, CPU, kernels)
    groups, cache = a_round()
    for _ in range(3):
        plan = backend.plan(groups, cache)
        for _ in range(4):
            agree(backend, groups, cache, LAYERS["plain"], plan)
            agree(backend, groups, cache, LAYERS["window"], plan)
    # A wrapper for trees and one for chunks, of two kinds of layer.
    assert [wrapper.plans for wrapper in Counted.made] == [3, 3, 3, 3]


def test_a_plan_holds_whatever_was_planned_in_between(kernels: Any) -> None:
    backend = FlashInferBackend(PAGE, CPU, kernels)
    groups, cache = a_round()
    plan = backend.plan(groups, cache)
    agree(backend, groups, cache, LAYERS["plain"], plan)
    others = [trees([5, 30], [3, 3], groups[0].tables[:2])]
    fill_cache(cache, others)
    agree(backend, others, cache, LAYERS["plain"])
    fill_cache(cache, groups)
    agree(backend, groups, cache, LAYERS["plain"], plan)


def test_plain_decoding_needs_no_mask(kernels: Any) -> None:
    tables = torch.randperm(36).view(3, 12)
    group, cache = trees([0, 17, 40], [0, 0, 0], tables), a_cache(36)
    fill_cache(cache, [group])
    backend = FlashInferBackend(PAGE, CPU, kernels)
    for layer in ("plain", "window", "sinks"):
        agree(backend, [group], cache, LAYERS[layer])
    assert all(wrapper._custom_mask_buf is None for wrapper in Counted.made)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("seed", range(4))
def test_packed_masks_hold_what_dense_ones_do(window: int | None, seed: int) -> None:
    groups, _ = a_round(seed)
    for group in groups:
        for causal in (True, False):
            span = whole([group], PAGE, window)
            packed = packed_mask([group], span, causal=causal, window=window)
            keys = max(c + n for c, n in zip(group.contexts, group.lengths, strict=True))
            dense = visible_keys(group, max(group.lengths), keys, causal, window)
            at = 0
            for b, (length, size) in enumerate(zip(group.lengths, mask_bytes([group], span), strict=True)):
                part = dense[b, :length, span.first[b] : span.last[b]].numpy()
                expected = np.packbits(part.reshape(-1), bitorder="little")
                assert packed[at : at + size].tolist() == expected.tolist()
                assert not dense[b, :length, : span.first[b]].any(), "a page was left out that is seen"
                at += size
            assert at == len(packed)


def test_plan_arrays_name_each_key_once_in_order() -> None:
    groups, _ = a_round()
    for span in (whole(groups, PAGE), whole(groups, PAGE, 6), *halves(groups, PAGE)):
        arrays = paged_arrays(groups, span, PAGE)
        assert arrays.qo_indptr.tolist() == np.cumsum([0, 10, 5, 7, 1, 7, 5]).tolist()
        tables = [table for group in groups for table in group.tables]
        for i, table in enumerate(tables):
            pages = arrays.indices[arrays.kv_indptr[i] : arrays.kv_indptr[i + 1]].long()
            count = (len(pages) - 1) * PAGE + int(arrays.last_page_len[i])
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)[:count]
            expected = slots_of(table[None], torch.arange(span.first[i], span.last[i])[None], PAGE)[0]
            assert slots.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["plain", "window", "sinks everywhere"])
@pytest.mark.parametrize("split_from", [None, 0])
def test_a_captured_plan_is_refilled_in_place(name: str, split_from: int | None, kernels: Any) -> None:
    backend = FlashInferBackend(PAGE, CPU, kernels, split_from=split_from)
    assert isinstance(backend, CapturableBackend)
    tables = torch.randperm(48).view(4, 12)
    cache = a_cache(48)
    first = trees([13, 2, 0, 4], [9, 4, 6, 1], tables)
    static = backend.reserve(first, cache)
    fill_cache(cache, [first])
    static.fill(first)
    agree(static, [first], cache, LAYERS[name], static.begin())
    made = len(Counted.made)
    places = [buffer.data_ptr() for wrapper in static.wrappers() for buffer in buffers_of(wrapper)]
    for contexts, widths in (([1, 3, 22, 8], [5, 5, 5, 5]), ([27, 30, 2, 0], [0, 11, 1, 8])):
        group = trees(contexts, widths, tables[torch.randperm(4)])
        assert backend.static_shape(group) == backend.static_shape(first)
        fill_cache(cache, [group])
        static.fill(group)
        agree(static, [group], cache, LAYERS[name], static.begin())
    assert len(Counted.made) == made
    assert [buffer.data_ptr() for wrapper in static.wrappers() for buffer in buffers_of(wrapper)] == places


def buffers_of(wrapper: Any) -> list[torch.Tensor]:
    names = ["_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"]
    found = [getattr(wrapper, name) for name in (*names, "_custom_mask_buf", "_mask_indptr_buf")]
    return [buffer for buffer in found if buffer is not None]


def test_a_captured_plan_refuses_another_shape(kernels: Any) -> None:
    backend = FlashInferBackend(PAGE, CPU, kernels, split_from=16)
    tables, cache = torch.arange(24).view(2, 12), a_cache(24)
    static = backend.reserve(trees([3, 4], [3, 3], tables), cache)
    with pytest.raises(EngineError, match="static shape"):
        static.fill(trees([20, 30], [3, 3], tables))
    with pytest.raises(EngineError, match="was given"):
        static.fill(trees([3, 4], [3, 4], tables))


def test_workspace_has_room_for_the_tiles_of_a_bucket() -> None:
    # 64 requests of 16 rows, 32 heads on 8 key heads: 32 + 63 tiles of 128 rows.
    bounds = Bounds(rows=1024, requests=64, pages_each=512, queries=64)
    needed = 32 * 95 * 128 * (128 + 1) * 4
    assert needed <= workspace_bytes(32, 8, 128, processors=132, bounds=bounds) < needed + (2 << 20)
    # Plain decoding: tiles of 16 rows are enough.
    alone = Bounds(rows=1024, requests=1024, pages_each=512, queries=64)
    assert workspace_bytes(32, 8, 128, processors=132, bounds=alone) < 32 * 1279 * 16 * 129 * 4 + (2 << 20)
    assert workspace_bytes(32, 8, 128, processors=132) >= 32 * 33 * 128 * 129 * 4


def test_the_interpreter_has_the_real_signatures() -> None:
    real = pytest.importorskip("flashinfer")
    for name in ("__init__", "plan", "run"):
        ours = inspect.signature(getattr(interpreter.BatchPrefillWithPagedKVCacheWrapper, name)).parameters
        theirs = inspect.signature(getattr(real.BatchPrefillWithPagedKVCacheWrapper, name)).parameters
        assert set(ours) <= set(theirs)
        order = [key for key, about in theirs.items() if key in ours and about.kind is about.POSITIONAL_OR_KEYWORD]
        assert [key for key in ours if key in order] == order
    for method, name in (("run", "_custom_mask_buf"), ("run", "_mask_indptr_buf"), ("plan", "_custom_mask_buf")):
        assert name in inspect.getsource(getattr(real.BatchPrefillWithPagedKVCacheWrapper, method))
    merge = inspect.signature(real.merge_state_in_place).parameters
    assert list(merge)[:4] == list(inspect.signature(interpreter.merge_state_in_place).parameters)


def test_contexts_are_split_off_where_masks_would_be_large() -> None:
    def section(contexts: list[int], width: int) -> Section:
        tables = torch.zeros(len(contexts), 1, dtype=torch.int64)
        return sections_of([trees(contexts, [width] * len(contexts), tables)], joined=False)[0]

    assert not pays_to_split(section([2047], 9), 2048)
    assert pays_to_split(section([10, 2048], 9), 2048)
    # 32 requests of 16 rows: half the context makes as many bits.
    assert pays_to_split(section([1024] * 32, 15), 2048)
    assert not pays_to_split(section([1023] * 32, 15), 2048)
    assert not pays_to_split(section([4000], 0), 2048)
