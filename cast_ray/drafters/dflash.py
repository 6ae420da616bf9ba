"""DFlash: a one-pass block drafter over the target's features (z-lab's public architecture).

A block is the root and `B - 1` mask tokens. Its positions attend to the context, whose keys and values come from the
target's features of the committed tokens, and to each other; one forward scores all `B - 1` next tokens. The context is
kept in a KV cache on the target's own slots; the block's entries lie behind it and are overwritten by the next round.
DFlash 2 is the same network with the parts of `dflash2`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.checkpoint import WEIGHTS, DFlashConfig
from cast_ray.drafters.dflash2 import CandidateSelector, DynamicConv
from cast_ray.drafters.head import DraftHead, read_shortlist
from cast_ray.drafters.pending import PendingRows
from cast_ray.errors import DrafterError, describe
from cast_ray.models.attention.base import AttentionBackend, Group, Layer, StaticAttention
from cast_ray.models.fused import speed_up_network
from cast_ray.models.kv_cache import KVCache, slots_of
from cast_ray.models.target import Target
from cast_ray.trees.pack import DraftScores

if TYPE_CHECKING:
    from cast_ray.drafters.graphs import DraftGraphs

# Context rows that may wait for the next proposal; when there are more, they are written to the cache by themselves.
MAX_PENDING_ROWS = 1024


@dataclass(frozen=True)
class _Forward:
    """What all layers of one draft forward share. Rows: new context first, then the blocks.

    cos, sin: `[n, head_dim]` of all rows; slots: `[n]`; context_rows: how many of the n are context.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    context_rows: int
    cache: KVCache
    backend: AttentionBackend | StaticAttention
    plan: Any


class DFlashAttention(nn.Module):
    """Queries from the block alone; keys and values from new context and block."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        model = config.model
        self.head_dim = int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
        inner, kv = model.num_attention_heads * self.head_dim, model.num_key_value_heads * self.head_dim
        bias = bool(model.attention_bias)
        self.q_proj = nn.Linear(model.hidden_size, inner, bias=bias)
        self.k_proj = nn.Linear(model.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(model.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(inner, model.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=model.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=model.rms_norm_eps)
        sliding = bool(model.layer_types) and model.layer_types[index] == "sliding_attention"
        self.layer = Layer(
            index=index,
            scaling=self.head_dim**-0.5,
            causal=sliding if config.causal is None else config.causal,
            window=model.sliding_window if sliding else None,
        )

    def write_keys(self, rows: Tensor, forward: _Forward) -> None:
        """Keys and values of rows `[n, hidden]` into the cache."""
        keys = self.k_norm(self.k_proj(rows).view(rows.shape[0], -1, self.head_dim))
        values = self.v_proj(rows).view(rows.shape[0], -1, self.head_dim)
        forward.cache.write(self.layer.index, forward.slots, _rotate(keys, forward.cos, forward.sin), values)

    def forward(self, blocks: Tensor, context: Tensor, forward: _Forward) -> Tensor:
        """blocks `[m, hidden]`, context `[c, hidden]` -> `[m, hidden]`."""
        self.write_keys(torch.cat([context, blocks]) if forward.context_rows else blocks, forward)
        queries = self.q_norm(self.q_proj(blocks).view(blocks.shape[0], -1, self.head_dim))
        queries = _rotate(queries, forward.cos[forward.context_rows :], forward.sin[forward.context_rows :])
        out = forward.backend.run(forward.plan, queries, self.layer)
        return self.o_proj(out.reshape(blocks.shape[0], -1))


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        model = config.model
        self.self_attn = DFlashAttention(config, index)
        self.mlp = Qwen3MLP(model)
        self.input_layernorm = Qwen3RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.attention_conv = _convolution(config)
        self.mlp_conv = _convolution(config)

    def forward(self, blocks: Tensor, context: Tensor, forward: _Forward) -> Tensor:
        attend = partial(self.self_attn, context=context, forward=forward)
        blocks = blocks + _within(self.attention_conv, attend, self.input_layernorm(blocks))
        return blocks + _within(self.mlp_conv, self.mlp, self.post_attention_layernorm(blocks))


class DFlashModel(nn.Module):
    """The network; parameter names are those of the public format."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        model = config.model
        self.layers = nn.ModuleList([DFlashLayer(config, i) for i in range(model.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.fc = nn.Linear(len(config.taps) * model.hidden_size, model.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(model)
        self.candidate_selector: CandidateSelector | None = None
        if config.dflash2 is not None:
            self.candidate_selector = CandidateSelector(model.hidden_size, model.vocab_size, config.dflash2)

    def context(self, features: Tensor) -> Tensor:
        """Features `[c, taps * hidden]` -> what every layer makes keys and values of, `[c, hidden]`."""
        return self.hidden_norm(self.fc(features))

    def forward(self, blocks: Tensor, context: Tensor, forward: _Forward) -> Tensor:
        """blocks `[m, hidden]`, context `[c, hidden]` -> normed hidden states of the blocks `[m, hidden]`."""
        for layer in self.layers:
            blocks = layer(blocks, context, forward)
        return self.norm(blocks)


class DFlashDrafter:
    """A DFlash network on a target's embedding, output head and pages; see drafters.base for the contract."""

    def __init__(
        self,
        config: DFlashConfig,
        network: DFlashModel,
        target: Target,
        slots: int,
        page_size: int,
        shortlist: Tensor | None = None,
    ) -> None:
        self.config = config
        self.head = DraftHead(target.head, config, shortlist)
        self.block_size = config.block_size
        self.taps = config.taps
        self.network = network
        self._target = target
        self._page_size = page_size
        attention = network.layers[0].self_attn
        self.cache = KVCache(
            layers=len(network.layers),
            slots=slots,
            kv_heads=config.model.num_key_value_heads,
            head_dim=int(attention.head_dim),  # type: ignore[arg-type, union-attr]
            dtype=target.dtype,
            device=target.device,
            scratch=page_size,
        )
        self._block_tail = torch.full((1, config.block_size - 1), config.mask_token_id, device=target.device)
        width = len(config.taps) * target.hidden_size
        self.graphs: DraftGraphs | None = None
        self._pending = PendingRows(MAX_PENDING_ROWS, width, target.dtype, target.device)

    def shape(self) -> dict[str, Any]:
        return {
            "kind": "dflash2" if self.config.dflash2 else "dflash",
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "layers": len(self.network.layers),
            "block_size": self.block_size,
            "taps": list(self.taps),
            "shortlist": self.head.size,
        }

    def observe(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        if not self._pending.has_room(features.shape[0]):
            self._write_context()
        if self._pending.has_room(features.shape[0]):
            self._pending.add(features, slots, positions)
        else:
            self.write_rows(features, slots, positions)

    def forget(self, pages: list[int]) -> None:
        self._pending.forget(torch.tensor(pages, device=self._target.device), self._page_size)

    def propose(self, contexts: DraftContexts, top_k: int) -> DraftScores:
        rows = self._pending.take()
        if self.graphs is not None:
            scores = self.graphs.run(contexts, rows, top_k)
            if scores is not None:
                return scores
        return self.scores(self._block_hidden(contexts, rows), contexts.roots, contexts.temperatures, top_k)

    def scores(self, hidden: Tensor, roots: Tensor, temperatures: Tensor | None, top_k: int) -> DraftScores:
        """Scores from the final states of blocks `[B, block_size, hidden]`; the rest is as DraftContexts has it."""
        hidden = hidden[:, 1:]
        logits = self.head.logits(hidden)
        # A greedy request has no temperature to divide by: its candidates are weighed at 1.
        weighed = None if temperatures is None else torch.where(temperatures > 0, temperatures, 1.0)
        selector = self.network.candidate_selector
        if selector is not None:
            if weighed is None:
                weighed = torch.ones(roots.shape[0], device=logits.device)
            return selector.scores(hidden, *self.head.best(logits, selector.top_k), roots, weighed)
        if weighed is not None:
            logits = logits / weighed[:, None, None]
        best, token_ids = self.head.best(logits, top_k)
        return DraftScores(best - logits.logsumexp(dim=-1, keepdim=True), token_ids)

    def block_logits(self, contexts: DraftContexts) -> Tensor:
        """Draft logits of every depth: `[B, block_size - 1, vocab]` float32, or over the shortlist."""
        return self.head.logits(self.block_hidden(contexts)[:, 1:])

    def block_hidden(self, contexts: DraftContexts) -> Tensor:
        """One draft forward: `[B, block_size, hidden]`. Takes what was observed into the context on the way."""
        return self._block_hidden(contexts, self._pending.take())

    def blocks(self, positions: Tensor, lengths: list[int], tables: Tensor) -> Group:
        """The blocks of requests, roots at `positions` `[B]`, `lengths` as numbers; tables: `[B, P]`."""
        places = positions[:, None] + torch.arange(self.block_size, device=positions.device)
        return Group(0, [self.block_size] * len(lengths), lengths, tables, places)

    def hidden(
        self,
        roots: Tensor,
        features: Tensor,
        slots: Tensor,
        positions: Tensor,
        backend: AttentionBackend | StaticAttention,
        plan: Any,
    ) -> Tensor:
        """Final states `[B, block_size, hidden]` of the blocks of roots `[B]`.

        features: `[c, taps * hidden]` of tokens that enter the context. slots, positions: `[c + B * block_size]`,
        theirs and then the blocks'.
        """
        batch = roots.shape[0]
        forward = self._forward(slots, positions, features.shape[0], backend, plan)
        tokens = torch.cat([roots[:, None], self._block_tail.expand(batch, -1)], dim=1)
        blocks = F.embedding(tokens.reshape(-1), self._target.embedding)
        if self.config.input_scale != 1.0:
            blocks = blocks * self.config.input_scale
        context = self.network.context(features) if forward.context_rows else features
        return self.network(blocks, context, forward).view(batch, self.block_size, -1)

    def write_rows(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Put features `[c, taps * hidden]` into the cache without drafting."""
        if slots.shape[0]:
            backend = self._target.backend
            forward = self._forward(slots, positions, slots.shape[0], backend, backend.plan([], self.cache))
            context = self.network.context(features)
            for layer in self.network.layers:
                layer.self_attn.write_keys(context, forward)  # type: ignore[union-attr, operator]

    def _block_hidden(self, contexts: DraftContexts, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        features, slots, positions = rows
        group = self.blocks(contexts.positions, contexts.lengths, contexts.tables)
        block_slots = slots_of(contexts.tables, group.positions, self._page_size)
        backend = self._target.backend
        return self.hidden(
            contexts.roots,
            features,
            torch.cat([slots, block_slots.reshape(-1)]),
            torch.cat([positions, group.positions.reshape(-1)]),
            backend,
            backend.plan([group], self.cache),
        )

    def _write_context(self) -> None:
        """Put what was observed into the cache without drafting."""
        self.write_rows(*self._pending.take())

    def _forward(
        self,
        slots: Tensor,
        positions: Tensor,
        context_rows: int,
        backend: AttentionBackend | StaticAttention,
        plan: Any,
    ) -> _Forward:
        cos, sin = self.network.rotary_emb(self._target.embedding[:1], positions[None])
        return _Forward(cos[0], sin[0], slots, context_rows, self.cache, backend, plan)


def load_dflash(folder: Path, config: DFlashConfig, target: Target, slots: int, page_size: int) -> DFlashDrafter:
    """The drafter of `folder` on `target`, whose taps must be the config's. DrafterError when it is unreadable."""
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read ({error})"
        remedy = "Give a folder with safetensors weights"
        raise DrafterError(describe("drafter", str(folder / WEIGHTS), problem, remedy)) from None
    network = build_network(config, weights, folder).to(target.device, target.dtype).eval()
    # The cast rounds the rotary frequencies too; far positions need them in float32.
    network.rotary_emb = Qwen3RotaryEmbedding(config.model).to(target.device)
    speed_up_network(network)
    shortlist = read_shortlist(folder, target.vocab_size, target.device)
    return DFlashDrafter(config, network, target, slots, page_size, shortlist)


def build_network(config: DFlashConfig, weights: dict[str, Tensor], source: Path) -> DFlashModel:
    """The network with these weights; DrafterError names tensors that are missing, foreign or of another shape."""
    weights = {f"{name}.weight" if name.endswith("_codebook") else name: tensor for name, tensor in weights.items()}
    network = DFlashModel(config).requires_grad_(False)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected != found:
        wrong = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
        shown = "; ".join(f"{n}: expected {expected.get(n, 'none')}, found {found.get(n, 'none')}" for n in wrong[:5])
        problem = f"has {len(wrong)} tensors that do not fit its config.json ({shown})"
        remedy = "Give a complete DFlash checkpoint, config.json and model.safetensors of one model"
        raise DrafterError(describe("drafter", str(source), problem, remedy))
    network.load_state_dict(weights)
    return network


def _convolution(config: DFlashConfig) -> DynamicConv | None:
    return DynamicConv(config.model.hidden_size, config.block_size, config.dflash2) if config.dflash2 else None


def _within(convolution: DynamicConv | None, inner: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return inner(rows) if convolution is None else convolution(inner, rows)


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rows `[n, heads, head_dim]`, cos and sin `[n, head_dim]`."""
    return rows * cos[:, None] + rotate_half(rows) * sin[:, None]
