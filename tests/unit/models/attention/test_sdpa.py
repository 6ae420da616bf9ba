"""The SDPA backend against attention written out key by key, on ragged batches of random trees and prompt chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cast_ray.models.attention import sdpa
from cast_ray.models.attention.base import Group, Layer
from cast_ray.models.attention.parts import cut
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.graph_safety import Watch
from cast_ray.models.kv_cache import KVCache, slots_of
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import ancestor_mask

PAGE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8
LAYERS = {
    "plain": Layer(0, 0.3),
    "window": Layer(1, 0.3, window=5),
    "softcap": Layer(0, 0.3, softcap=2.0),
    "sinks": Layer(1, 0.3, window=7, sinks=torch.linspace(-1, 2, HEADS)),
}


def written_out(
    query: Tensor, position: int, keys: Tensor, values: Tensor, key_positions: list[int], layer: Layer, two_sided: bool
) -> Tensor:
    """One query `[heads, dim]` over the keys it may see."""
    out = torch.zeros(HEADS, DIM)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores, seen = [], []
        for k, key_position in enumerate(key_positions):
            distance = position - key_position
            if layer.window is not None and (distance >= layer.window or (two_sided and -distance >= layer.window)):
                continue
            score = float(query[head] @ keys[k, kv]) * layer.scaling
            scores.append(layer.softcap * math.tanh(score / layer.softcap) if layer.softcap else score)
            seen.append(k)
        sink = [float(layer.sinks[head])] if layer.sinks is not None else []
        weights = torch.softmax(torch.tensor(scores + sink), dim=0)[: len(scores)]
        out[head] = weights @ values[seen, kv]
    return out


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize(("part_bytes", "looks"), [(sdpa.PART_BYTES, True), (1, True), (1, False)])
def test_trees_chunks_and_blocks_equal_attention_written_out(
    name: str, consecutive: bool, part_bytes: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "PART_BYTES", part_bytes)
    torch.manual_seed(2)
    layer = LAYERS[name]
    order = torch.arange(60) if consecutive else torch.randperm(60)
    tables = order.view(5, 12)
    cache = KVCache(2, KV_HEADS, DIM, slots=60 * PAGE, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.fill_(float("nan"))  # memory that nobody wrote must not matter

    scores = DraftScores(torch.randn(2, 4, 5).log_softmax(-1), torch.arange(5).expand(2, 4, 5).contiguous())
    tree = pack(scores, 9)
    contexts, widths = [13, 2], [9, 4]
    depths = torch.cat([torch.zeros(2, 1, dtype=torch.int64), tree.depths], 1)
    tree_positions = torch.tensor(contexts)[:, None] + depths
    mask = ancestor_mask(tree, 9)
    groups = [
        Group(0, [w + 1 for w in widths], contexts, tables[:2], tree_positions, mask),
        Group(15, [7], [3], tables[2:3], torch.arange(3, 10)[None]),
        Group(22, [5, 5], [6, 0], tables[3:], torch.tensor([range(6, 11), range(5)])),
    ]
    queries = torch.randn(32, HEADS, DIM)
    expected = torch.zeros_like(queries)
    backend = SdpaBackend(PAGE, looks=looks)
    for group in groups:
        row = group.start
        for b, (length, context) in enumerate(zip(group.lengths, group.contexts, strict=True)):
            count = context + length
            slots = slots_of(group.tables[b : b + 1], torch.arange(count)[None], PAGE)[0]
            keys, values = torch.randn(2, count, KV_HEADS, DIM)
            cache.write(layer.index, slots, keys, values)
            positions = [*range(context), *group.positions[b, :length].tolist()]
            for i in range(length):
                own = group.mask[b, i, :length].tolist() if group.mask is not None else [j <= i for j in range(length)]
                visible = [*range(context), *(context + j for j in range(length) if own[j])]
                seen = [positions[k] for k in visible]
                expected[row + i] = written_out(
                    queries[row + i], positions[context + i], keys[visible], values[visible], seen, layer, False
                )
            row += length
    with Watch() as watch:
        out = backend.run(backend.plan(groups, cache), queries, layer)
    assert looks or not watch.reads
    assert not watch.uploads
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_block_that_is_not_causal_sees_both_ways(window: int | None) -> None:
    torch.manual_seed(3)
    layer = Layer(0, 0.3, causal=False, window=window)
    cache = KVCache(1, KV_HEADS, DIM, slots=48, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.fill_(float("nan"))
    tables = torch.arange(12).view(2, 6)
    group = Group(0, [6, 6], [5, 9], tables, torch.tensor([range(5, 11), range(9, 15)]))
    queries, expected = torch.randn(12, HEADS, DIM), torch.zeros(12, HEADS, DIM)
    for b, context in enumerate(group.contexts):
        keys, values = torch.randn(2, context + 6, KV_HEADS, DIM)
        cache.write(0, slots_of(tables[b : b + 1], torch.arange(context + 6)[None], PAGE)[0], keys, values)
        for i in range(6):
            expected[6 * b + i] = written_out(
                queries[6 * b + i], context + i, keys, values, list(range(context + 6)), layer, True
            )
    backend = SdpaBackend(PAGE)
    out = backend.run(backend.plan([group], cache), queries, layer)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_plain_round_of_unlike_contexts_equals_attention_written_out(window: int | None) -> None:
    """One new token a request, contexts from none to many, cut into parts that are not in the batch's order."""
    torch.manual_seed(4)
    layer = Layer(0, 0.3, window=window)
    contexts = [17, 0, 5, 19, 1, 16, 5]
    cache = KVCache(1, KV_HEADS, DIM, slots=42 * PAGE, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.fill_(float("nan"))
    tables = torch.randperm(42).view(7, 6)
    group = Group(0, [1] * 7, contexts, tables, torch.tensor(contexts)[:, None])
    queries, expected = torch.randn(7, HEADS, DIM), torch.zeros(7, HEADS, DIM)
    for b, context in enumerate(contexts):
        keys, values = torch.randn(2, context + 1, KV_HEADS, DIM)
        cache.write(0, slots_of(tables[b : b + 1], torch.arange(context + 1)[None], PAGE)[0], keys, values)
        seen = list(range(context + 1))
        expected[b] = written_out(queries[b], context, keys, values, seen, layer, False)
    backend = SdpaBackend(PAGE)
    plan = backend.plan([group], cache)
    torch.testing.assert_close(backend.run(plan, queries, layer), expected, atol=1e-5, rtol=1e-5)
    for most_keys in (18, 40, 60):
        parts = cut(group, PAGE, most_keys)
        assert all(part.batch == 1 or part.batch * part.keys <= most_keys for part in parts)
        assert sorted(row for part in parts for row in part.first_row.tolist()) == list(range(7))
        plan = type(plan)(parts, cache)
        torch.testing.assert_close(backend.run(plan, queries, layer), expected, atol=1e-5, rtol=1e-5)


def test_a_wide_tree_does_not_pad_the_plain_requests_beside_it() -> None:
    group = Group(0, [1, 30, 1, 2], [8, 8, 8, 8], torch.arange(40).view(4, 10), torch.zeros(4, 30, dtype=torch.int64))
    assert sorted((part.batch, part.queries) for part in cut(group, PAGE, 10**6)) == [(1, 2), (1, 30), (2, 1)]
    assert [part.batch for part in cut(group, PAGE, None)] == [4]
