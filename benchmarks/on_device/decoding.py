"""The parts that decode: one model's start, its verify table, Hugging Face beside it, and tokens a second by method."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from cast_ray.config import EngineConfig
from cast_ray.engine.books import Event
from cast_ray.engine.engine import Engine
from cast_ray.engine.setup import policy_table
from cast_ray.engine.totals import Totals
from cast_ray.request import SamplingParams
from cast_ray.width.policy import make_policy
from on_device.latency import DATASHEET, copy_bandwidth, plain_transformers, read_bytes, verify_table
from on_device.part import Part, wait
from on_device.scripted import ScriptedDrafter, fit_rates
from on_device.shapes import SHAPES, STRIDE, engine_of, make_target

METHODS = ("ar", "chain", "fixed:127", "joint")
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# Rounds of a load before it is timed, and at least while it is: sizes are recorded, and `joint` finds its width.
WARM_ROUNDS, LEAST_ROUNDS = 12, 5


def model(part: Part, name: str, decodes: bool) -> None:
    """One shape: start an engine on it, then measure in order of worth."""
    logging.basicConfig(level=logging.WARNING)
    tiny = part.tiny
    shape = SHAPES["tiny" if tiny else name]
    began = time.monotonic()
    loaded = make_target(shape, part.device, part.dtype)
    wait(part.device)
    made = time.monotonic()
    # Before the engine takes what memory there is.
    bandwidth = copy_bandwidth(part.device, 1 << 22 if tiny else 4 << 30)
    nodes = 15 if tiny else 127
    config = EngineConfig(
        # Without `joint` no latency table is measured: for figures of single forwards there is no need.
        width="joint" if decodes else f"fixed:{nodes}",
        dtype="float32" if part.device.type == "cpu" else "bfloat16",
        device=part.device.type,
        graphs="on",
        graph_seconds=1.0 if tiny else 15.0,
        probe_seconds=1.5 if tiny else 15.0,
        max_batch_size=3 if tiny else 128,
        max_nodes=nodes,
        max_step_tokens=64 if tiny else 8192,
        max_context=256 if tiny else 20000,
        kv_cache_tokens=1024 if tiny else None,
        watch_drafter=False,
    )
    with engine_of(shape, loaded, config) as engine:
        target = engine._parts.target
        part.put("start", {"weights_s": made - began, "engine_s": time.monotonic() - made})
        graphs = target.graphs.report() if target.graphs is not None else None
        attention = engine._parts.attention
        part.put("attention", {"backend": attention.name, "reason": attention.reason})
        part.put("graphs_at_start", graphs)
        part.put("memory", _memory(part, engine, bandwidth))
        whole = part.seconds
        if decodes:
            part.seconds = whole * (0.7 if tiny else 0.45)
        verify_table(part, engine, _points(tiny, decodes), bandwidth)
        part.seconds = whole
        if decodes:
            # On a CPU an engine takes the model's blocks apart: there the other side gets one of its own.
            theirs = target.model if part.device.type == "cuda" else make_target(shape, part.device, part.dtype).model
            for batch in (1, 3) if tiny else (1, 8):
                row = plain_transformers(theirs, batch, 16 if tiny else 1000, 4 if tiny else 24, part.device)
                part.append("transformers_eager", row)
            decode(part, engine)
        if target.graphs is not None:
            part.put("graphs", target.graphs.report())


def decode(part: Part, engine: Engine) -> None:
    """Tokens a second of every method at every concurrency, with scripted acceptance."""
    parts, tiny = engine._parts, part.tiny
    inner: Any = parts.drafter
    rates = fit_rates(inner.block_size - 1, 15 if tiny else 127)
    part.put("acceptance", {"certainty": rates.certainty, "covered": rates.covered, "fitted_to": rates.source})
    loads = [(c, m) for c in ((1, 3) if tiny else (1, 8, 32, 128)) for m in METHODS]
    for place, (concurrency, method) in enumerate(loads):
        if part.left < 1:
            part.put("decode_stopped", f"time was up before {method} at {concurrency} requests")
            return
        seconds = min(0.2 if tiny else 4.0, part.left / (len(loads) - place) / 2)
        spec = "fixed:15" if tiny and method == "fixed:127" else method
        table = policy_table(parts.latency)
        policy = make_policy(spec, block_size=inner.block_size, max_nodes=engine.config.max_nodes, latency=table)
        engine.use_policy(policy, drafter=ScriptedDrafter(inner, rates, parts.target.vocab_size))
        part.append(
            "decode", {"method": spec, "concurrency": concurrency, **_measure(part, engine, concurrency, seconds)}
        )


def _measure(part: Part, engine: Engine, concurrency: int, seconds: float) -> dict[str, Any]:
    """Steady rounds of so many requests: from when all decode until the time is up or the first of them ends."""
    length = 20 if part.tiny else 1000
    vocab = engine._parts.target.vocab_size
    ids = [f"r{number}" for number in range(concurrency)]
    found: dict[str, list[int]] = {name: [] for name in ids}
    last = {}
    for number, name in enumerate(ids):
        prompt = [(number * 101 + place * 7) % vocab for place in range(length)]
        last[name] = prompt[-1]
        engine.submit(name, prompt, SamplingParams(max_tokens=100_000, ignore_eos=True))
    ended, tokens = False, 0

    def take(events: list[Event]) -> None:
        nonlocal ended, tokens
        for event in events:
            found[event.request_id] += event.token_ids
            tokens += len(event.token_ids)
            ended = ended or event.completion is not None

    def step() -> None:
        engine.advance(take)  # as a server does: what a round brought is told while the next is computed

    while not ended and not all(found.values()):
        step()
    for _ in range(WARM_ROUNDS):
        if not ended:
            step()
    wait(part.device)
    totals = engine.totals
    before = _sums(totals)
    began, rounds, tokens = time.perf_counter(), 0, 0
    while not ended and (rounds < LEAST_ROUNDS or time.perf_counter() - began < seconds):
        step()
        rounds += 1
    wait(part.device)
    taken, timed = time.perf_counter() - began, tokens
    draft, verify, host, hidden, nodes = (b - a for a, b in zip(before, _sums(totals), strict=True))
    for name in ids:
        engine.abort(name)
    take(engine.flush())
    exact = all(
        token == (last[name] + (place + 1) * STRIDE) % vocab
        for name, tokens_of in found.items()
        for place, token in enumerate(tokens_of)
    )
    each = max(rounds, 1)
    return {
        "tokens_per_s": timed / taken,
        "round_length": timed / each / concurrency,
        "round_ms": taken / each * 1000,
        "draft_ms": draft / each,
        "verify_ms": verify / each,
        "host_ms": host / each,
        "hidden_ms": hidden / each,
        "not_forward_ms": (taken * 1000 - draft - verify) / each,
        "nodes": nodes / each / concurrency,
        "rounds": rounds,
        "exact": exact,
    }


def _sums(totals: Totals) -> tuple[float, ...]:
    """ms of drafting, verifying, the host's work that delays a round and that it hides, and nodes verified."""
    return totals.draft_ms, totals.verify_ms, sum(totals.host.values()), totals.hidden_ms, totals.nodes_verified


def _memory(part: Part, engine: Engine, bandwidth: float) -> dict[str, Any]:
    weights = read_bytes(engine._parts.target, 0, 0)
    known = {"weight_bytes": weights, "copy_bytes_per_s": bandwidth, "weights_ms": weights / bandwidth * 1000}
    if part.device.type == "cuda":
        name = torch.cuda.get_device_name(part.device)
        sheet = next((rate for key, rate in DATASHEET.items() if key in name), None)
        known |= {"device": name, "pool_tokens": engine._parts.target.cache.slots}
        known |= {"datasheet_bytes_per_s": sheet, "datasheet_weights_ms": sheet and weights / sheet * 1000}
    return known


def _points(tiny: bool, decodes: bool) -> Iterator[tuple[int, int, int]]:
    """(batch, context, tokens a request): the paper's tables 5 and 6, then figure 6's batches."""
    if tiny:
        yield from ((1, 20, n) for n in (1, 4, 16))
        yield from ((1, 60, 1), (2, 20, 4))
        return
    yield from ((1, 1024, n) for n in COUNTS)
    for context in (8192, 16384):
        yield from ((1, context, n) for n in (1, 16, 32, 64, 128))
    if decodes:
        for batch in (4, 16, 64):
            yield from ((batch, 1024, n) for n in (1, 4, 8, 16, 32, 64, 128) if batch * n <= 1024)
        for context in (8192, 16384):
            yield from ((batch, context, n) for batch in (4, 16, 64) for n in (1, 8) if batch * context <= 1 << 19)
