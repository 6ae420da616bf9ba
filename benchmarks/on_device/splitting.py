"""From which context on FlashInfer should attend the cached pages of trees apart from the trees: both ways, timed.

`flashinfer.SPLIT_FROM` is a guess until this has run on a device; here is what to set it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cast_ray.models.attention.base import Layer
from cast_ray.models.attention.choose import Heads, choose_backend
from cast_ray.models.attention.flashinfer import SPLIT_FROM, FlashInferBackend
from cast_ray.models.kv_cache import KVCache
from on_device.equality import PAGE, random_roots, random_step
from on_device.latency import seconds_of
from on_device.part import Part

# Layers of a forward, which share one plan: those of Qwen3-8B.
LAYERS = 36
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
# Requests, and nodes of each.
LOADS = ((1, 15), (1, 63), (1, 127), (8, 31), (32, 15))
WAYS: dict[str, int | None] = {"whole_ms": None, "split_ms": 0}


def measure(part: Part) -> None:
    """The table for heads of Qwen3-8B, where FlashInfer is what an engine here would use."""
    heads = Heads(4, 2, 16) if part.tiny else Heads(32, 8, 128)
    choice = choose_backend("auto", PAGE, part.device, part.dtype, [heads])
    if not isinstance(choice.backend, FlashInferBackend):
        part.put("split_from", {"used": SPLIT_FROM, "not_measured": f"the backend is {choice.name}: {choice.reason}"})
        return
    kernels = choice.backend.kernels
    split_table(part, lambda least: FlashInferBackend(PAGE, part.device, kernels, split_from=least), heads)


@torch.inference_mode()
def split_table(
    part: Part,
    make: Callable[[int | None], Any],
    heads: Heads,
    contexts: Iterable[int] = CONTEXTS,
    loads: Iterable[tuple[int, int]] = LOADS,
) -> None:
    """A row of `split` for each load and context: ms of all attention of a forward, planning included, either way.

    make: a backend of the given `split_from`. Then, by rows of a forward, the context from which splitting stays the
    faster, None where it never does.
    """
    contexts = tuple(contexts)
    layer = Layer(0, heads.dim**-0.5)
    pays: dict[str, int | None] = {}
    for batch, nodes in loads:
        rows = batch * (nodes + 1)
        faster: list[tuple[int, bool]] = []
        for context in contexts:
            if part.left < 0:
                part.put("split_stopped", f"time was up before {rows} rows at context {context}")
                return
            pages = -(-(context + nodes + 1) // PAGE)
            slots = batch * pages * PAGE
            cache = KVCache(1, heads.kv, heads.dim, slots=slots, dtype=part.dtype, device=part.device, scratch=PAGE)
            cache.data.normal_()
            roots, _ = random_roots([context] * batch, pages, part.device, vocab=100)
            groups = random_step(roots, [nodes] * batch).groups
            queries = torch.randn(rows, heads.query, heads.dim, device=part.device).to(part.dtype)
            taken = {name: _forward_ms(make(least), groups, cache, queries, layer) for name, least in WAYS.items()}
            part.append("split", {"batch": batch, "rows": rows, "context": context, **taken})
            faster.append((context, taken["split_ms"] < taken["whole_ms"]))
        slower = [context for context, better in faster if not better]
        pays[str(rows)] = min((c for c, _ in faster if not slower or c > max(slower)), default=None)
    part.put("split_from", {"used": SPLIT_FROM, "faster_from_by_rows": pays})


def _forward_ms(backend: Any, groups: Any, cache: KVCache, queries: torch.Tensor, layer: Layer) -> float:
    plan = backend.plan(groups, cache)
    backend.run(plan, queries, layer)
    device = queries.device
    one = seconds_of(lambda: backend.run(plan, queries, layer), device, 10)
    planned = seconds_of(lambda: backend.run(backend.plan(groups, cache), queries, layer), device, 5)
    return (planned + (LAYERS - 1) * one) * 1000
