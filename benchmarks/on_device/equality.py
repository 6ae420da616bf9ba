"""Parts `backends` and `graphs`: attention backends against SDPA in float32, captured forwards against eager ones."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.graphs import DraftGraphs
from cast_ray.engine.setup import Heads
from cast_ray.models.attention.base import Group, Layer, Step
from cast_ray.models.attention.choose import choose_backend
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.flatten import Roots, flatten_trees, make_step
from cast_ray.models.graphs import TargetGraphs
from cast_ray.models.kv_cache import KVCache
from cast_ray.models.target import Target
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import no_tree
from cast_ray.width.buckets import Buckets
from on_device.part import Part
from on_device.shapes import SHAPES, Shape, make_drafter, make_target

PAGE = 16
# Of one attention over values of about 1, bfloat16 against float32 of the same inputs; and of two orders of float32
# sums, and of two orders of bfloat16 sums through some layers, as a share of the logits' spread.
ATTENTION_APART = 0.03
LOGITS_APART = {torch.float32: 1e-3, torch.bfloat16: 0.15}


@torch.inference_mode()
def backends(part: Part) -> None:
    """The backend that an engine here would choose, on random trees and blocks, against SDPA in float32."""
    heads = Heads(4, 2, 16) if part.tiny else Heads(32, 8, 128)
    choice = choose_backend("auto", PAGE, part.device, part.dtype, [heads])
    part.put("chosen", {"backend": choice.name, "reason": choice.reason})
    chosen = random.Random(1)
    torch.manual_seed(1)
    layers = {"plain": Layer(0, 0.09), "window": Layer(0, 0.09, window=40), "softcap": Layer(0, 0.09, softcap=20.0)}
    layers["both ways"] = Layer(0, 0.09, causal=False)
    contexts = [0, 3, 40, 61] if part.tiny else [0, 1, 200, 1000, 2500, 8100]
    for batch in (1, 3, 8):
        for name, layer in layers.items():
            lengths = [chosen.choice(contexts) for _ in range(batch)]
            widths = [chosen.choice([0, 7, 31, 60]) for _ in range(batch)]
            for planned in ("eager", "for capture"):
                apart = _apart(choice.backend, part, heads, lengths, widths, layer, static=planned == "for capture")
                row = {"layer": name, "planned": planned, "batch": batch, "contexts": lengths, "widths": widths}
                part.append("cases", {**row, "apart": apart, "ok": apart <= ATTENTION_APART})
            if part.left < 0:
                return


def _apart(
    backend: Any, part: Part, heads: Heads, contexts: list[int], widths: list[int], layer: Layer, *, static: bool
) -> float:
    """Greatest distance of the backend's answers from SDPA's in float32, over the same keys and queries."""
    pages = -(-(max(contexts) + max(widths) + 1) // PAGE)
    slots = len(contexts) * pages * PAGE
    cache = KVCache(1, heads.kv, heads.dim, slots=slots, dtype=part.dtype, device=part.device, scratch=PAGE)
    cache.data.normal_()
    roots, _ = random_roots(contexts, pages, part.device, vocab=100)
    step = random_step(roots, widths, with_mask=layer.causal)
    queries = torch.randn(step.tokens.shape[0], heads.query, heads.dim, device=part.device).to(part.dtype)
    if static:
        attention = backend.reserve(step.groups[0], cache)
        attention.fill(step.groups[0])
        found = attention.run(attention.begin(), queries, layer)
    else:
        found = backend.run(backend.plan(step.groups, cache), queries, layer)
    exact = KVCache(1, heads.kv, heads.dim, slots=slots, dtype=torch.float32, device=part.device, scratch=PAGE)
    exact.data.copy_(cache.data)
    reference = SdpaBackend(PAGE)
    expected = reference.run(reference.plan(step.groups, exact), queries.float(), layer)
    return float((found.float() - expected).abs().max())


@torch.inference_mode()
def graphs(part: Part) -> None:
    """A target of a few layers and its drafter: captured forwards against eager ones, in buckets of several sizes."""
    base = SHAPES["tiny" if part.tiny else "qwen3-8b"]
    few = 2 if part.tiny else 4
    block = {**base.drafter["dflash_config"], "target_layer_ids": [0, few - 1]}
    shape = Shape(
        base.name,
        {**base.target, "num_hidden_layers": few},
        {**base.drafter, "num_hidden_layers": 2, "num_target_layers": few, "dflash_config": block},
    )
    dtypes = [part.dtype] if part.device.type == "cpu" else [part.dtype, torch.float32]
    for dtype in dtypes:
        _graphs_in(part, shape, dtype)
        if part.left < 0:
            return


def _graphs_in(part: Part, shape: Shape, dtype: torch.dtype) -> None:
    loaded = make_target(shape, part.device, dtype)
    text = loaded.model.config
    heads = Heads(text.num_attention_heads, text.num_key_value_heads, text.head_dim)
    choice = choose_backend("auto", PAGE, part.device, dtype, [heads])
    config = _drafter_config(shape)
    longest = 90 if part.tiny else 1500
    pages = -(-(longest + 128) // PAGE)
    target = Target(loaded, choice.backend, 8 * pages * PAGE, taps=config.taps)
    target.cache.data.normal_()
    drafter = make_drafter(config, target, target.cache.slots, PAGE)
    drafter.cache.data.normal_()
    recorded = TargetGraphs(target, Buckets.up_to(256, 8))
    chosen, spread = random.Random(2), None
    for number, batch in enumerate((1, 1, 2, 3, 5, 8, 1, 8)):
        contexts = [chosen.randrange(1, longest) for _ in range(batch)]
        widths = [chosen.randrange(30) if number % 2 else 12 for _ in range(batch)]
        roots, tables = random_roots(contexts, pages, part.device, target.vocab_size)
        step = random_step(roots, widths)
        rows = torch.arange(step.tokens.shape[0], device=part.device)
        plain = target.forward(step, rows)
        spread = float(plain.logits.float().std())
        found = recorded.run(step, rows)
        if found is None:
            part.put(f"{dtype} verify", {**recorded.report(), "ok": False})
            return
        apart = float((found.logits.float() - plain.logits.float()).abs().max()) / spread
        same = float((found.logits.argmax(-1) == plain.logits.argmax(-1)).float().mean())
        row = {"dtype": str(dtype), "backend": choice.name, "batch": batch, "rows": len(rows), "apart": apart}
        part.append("verify", {**row, "same_tokens": same, "ok": apart <= LOGITS_APART[dtype]})
        _compare_drafts(part, drafter, target, DraftContexts(roots.tokens, contexts, roots.positions, tables, None))
    part.put(f"{dtype} report", recorded.report())


def _compare_drafts(part: Part, drafter: Any, target: Target, contexts: DraftContexts) -> None:
    drafter.graphs = None
    plain = drafter.propose(contexts, 8)
    drafter.graphs = DraftGraphs(drafter, target, Buckets.up_to(64, 8))
    found = drafter.propose(contexts, 8)
    same = float((plain.token_ids[..., 0] == found.token_ids[..., 0]).float().mean())
    apart = float((plain.logprobs - found.logprobs).abs().max())
    replayed = drafter.graphs.report()["replays"] == 1
    ok = replayed and apart <= LOGITS_APART[target.dtype]
    row = {"dtype": str(target.dtype), "batch": len(contexts.lengths), "apart": apart, "same_tokens": same}
    part.append("draft", {**row, "ok": ok})


def _drafter_config(shape: Shape) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.drafter), encoding="utf-8")
        return read_config(Path(folder))


def random_roots(contexts: list[int], pages: int, device: torch.device, vocab: int) -> tuple[Roots, Tensor]:
    """Requests on scattered pages."""
    batch = len(contexts)
    tables = torch.randperm(batch * pages, device=device).view(batch, pages)
    positions = torch.tensor(contexts, device=device)
    tokens = torch.randint(vocab, (batch,), device=device)
    return Roots(tokens, positions, contexts, tables), tables


def random_step(roots: Roots, widths: list[int], with_mask: bool = True) -> Step:
    """Random trees below the roots; without masks, blocks of as many tokens."""
    batch, device = len(widths), roots.tokens.device
    tree = no_tree(batch, device)
    if max(widths):
        scores = torch.randn(batch, 7, 16, device=device).log_softmax(-1)
        ids = torch.arange(16, device=device).expand_as(scores).contiguous()
        tree = pack(DraftScores(scores, ids), max(widths))
    step = make_step(flatten_trees(roots, tree, widths, PAGE, 1 << 20), [], PAGE)
    return step if with_mask else replace(step, groups=[_plain(step.groups[0])])


def _plain(group: Group) -> Group:
    places = torch.arange(group.positions.shape[1], device=group.positions.device)
    starts = torch.tensor(group.contexts, device=places.device)[:, None]
    return replace(group, mask=None, positions=starts + places)
