"""What a verifying forward takes by packed tokens, context and batch, against the time to read what it must read.

A point is the median of forwards that are waited for, `ms`, and the mean of forwards queued one behind the other,
`device_ms`: the difference is what the host adds where nothing hides it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cast_ray.calibration.probe import Probe
from cast_ray.engine.engine import Engine
from cast_ray.models.target import Target
from on_device.part import Part, wait

# Bytes a second that the vendor's datasheet gives an H200's memory; the copy test measures this device's own.
DATASHEET = {"H200": 4.8e12, "H100": 3.35e12}
REPEATS, QUEUED, SECONDS_A_POINT = 7, 5, 0.6


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second, read and written together, of a copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(seconds_of(lambda: target.copy_(source), device, 5) for _ in range(3))
    return 2 * size / seconds


def verify_table(part: Part, engine: Engine, points: Iterator[tuple[int, int, int]], bandwidth: float) -> None:
    """Time every (batch, context, tokens a request) that the pool holds, until the part's time is up."""
    parts = engine._parts
    probe = Probe(
        parts.target,
        parts.drafter,
        page_size=engine.config.page_size,
        max_batch=engine.config.max_batch_size,
        max_nodes=engine.config.max_nodes,
        max_context=parts.max_context,
        top_k=engine.config.candidates_per_depth,
    )
    with torch.inference_mode():
        for cache in (parts.target.cache, getattr(parts.drafter, "cache", None)):
            if cache is not None:
                cache.data.normal_()
        drafted = set()
        for batch, context, tokens in points:
            if part.left < 0:
                part.put("verify_stopped", f"time was up before batch {batch}, context {context}, n {tokens}")
                return
            if batch * (context + engine.config.max_nodes + 1) > parts.target.cache.slots - 64 * batch:
                continue
            run = probe.verifying(batch, context, tokens - 1)
            least = read_bytes(parts.target, batch, context)
            row = {"batch": batch, "context": context, "n": tokens, **_time(run, parts.device)}
            row["least_ms"] = least / bandwidth * 1000
            row["roofline_share"] = row["least_ms"] / row["device_ms"]
            part.append("verify", row)
            if parts.drafter is not None and (batch, context) not in drafted:
                drafted.add((batch, context))
                taken = _time(probe.drafting(batch, context), parts.device)
                part.append("draft", {"batch": batch, "context": context, **taken})


def read_bytes(target: Target, batch: int, context: int) -> int:
    """What a forward reads at least: all weights but the embedding, and the keys and values of every context."""
    size = sum(p.numel() * p.element_size() for p in target.model.parameters())
    size -= target.embedding.numel() * target.embedding.element_size()
    layers, _, _, kv_heads, dim = target.cache.data.shape
    return size + batch * context * layers * 2 * kv_heads * dim * target.cache.data.element_size()


def plain_transformers(model: Any, batch: int, context: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Hugging Face's own model, attention and cache, token by token without compiling: ms a token."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            tokens = torch.randint(model.config.vocab_size, (batch, context), device=device)
            out = model(tokens, use_cache=True, logits_to_keep=1)

            def step() -> Tensor:
                nonlocal out
                chosen = out.logits[:, -1:].argmax(-1)
                out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
                return out.logits

            step()
            ms = seconds_of(step, device, steps) * 1000
    finally:
        model.set_attn_implementation(ours)
    return {"batch": batch, "context": context, "ms_per_step": ms, "tokens_per_s": batch * 1000 / ms}


def _time(run: Callable[[], Tensor], device: torch.device) -> dict[str, float]:
    run()
    run()
    wait(device)
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 3 or (len(taken) < REPEATS and time.perf_counter() - began < SECONDS_A_POINT):
        taken.append(seconds_of(run, device, 1) * 1000)
    return {"ms": statistics.median(taken), "device_ms": seconds_of(run, device, QUEUED) * 1000}


def seconds_of(run: Callable[[], Any], device: torch.device, times: int) -> float:
    """Of one of `times` calls in a row, all of them waited for together."""
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait(device)
    return (time.perf_counter() - began) / times
