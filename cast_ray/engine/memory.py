"""How a device's free memory is shared, once the weights are on it: captured forwards, one step's work, the KV pool.

Arithmetic from shapes; nothing is allocated here. Graphs are captured over the pool, so what they may take is set aside
before it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cast_ray.config import EngineConfig
from cast_ray.errors import ModelError, describe
from cast_ray.models.fit import free_memory, gigabytes, total_memory

# Of the free memory: on a GPU the engine is alone with it, on a CPU the rest of the machine wants some.
GPU_SHARE, CPU_SHARE = 0.9, 0.25
# Graphs share one pool of buffers; an eighth of the free memory is beyond what they need on large devices.
GRAPH_BYTES, GRAPH_SHARE = 4 << 30, 0.125
# Copies of a step's logits while tokens are chosen: the model's, float32, processed, and their sorted best.
LOGIT_COPIES = 4
# Hidden states alive at once in a layer: its input, norm, projections and output.
HIDDEN_COPIES = 8
# Attention's workspace, the allocator's rounding, libraries' own buffers.
OTHER_BYTES = 512 << 20


@dataclass(frozen=True)
class Budget:
    """num_pages: of the KV pool. graph_bytes: what captured forwards may take, 0 on a CPU."""

    num_pages: int
    graph_bytes: int


def share_out(
    config: EngineConfig,
    text: Any,
    *,
    max_context: int,
    scratch: int,
    bytes_per_token: int,
    dtype: torch.dtype,
    device: torch.device,
    taps: int = 0,
    later: int = 0,
) -> Budget:
    """The pool's pages: as many as were asked for, else as fit and no more than can be used.

    text: the target's text config. bytes_per_token: of the pool, target and drafter. taps: layers whose features a
    drafter reads. later: bytes that are yet to be loaded. ModelError with the numbers where not even one request has
    room.
    """
    free = free_memory(device)
    if free is not None:
        free = max(0, free - later)
    graphs = _graph_bytes(free or 0) if device.type == "cuda" else 0
    work = step_bytes(config, text, dtype, taps) if device.type == "cuda" else 0
    wanted = config.max_batch_size * (max_context + scratch)
    if config.kv_cache_tokens is not None:
        wanted = config.kv_cache_tokens
    elif free is not None:
        share = config.memory_share or (GPU_SHARE if device.type == "cuda" else CPU_SHARE)
        wanted = min(wanted, max(0, int(free * share) - graphs - work) // bytes_per_token)
    pages = wanted // config.page_size
    least = -(-(2 + scratch) // config.page_size)  # a prompt of one token, an answer of one
    room = f"{device} has {_room(free, device, later)}, of which {gigabytes(graphs + work)} are for the computation"
    if pages < least:
        tokens = least * config.page_size
        problem = (
            f"{wanted} tokens of {bytes_per_token} bytes are too few for one request, which takes {tokens}; {room}"
        )
        remedy = f"Free some memory, lower max_nodes, or set kv_cache_tokens to {tokens} or more"
        raise ModelError(describe("kv_cache_tokens", config.kv_cache_tokens, problem, remedy))
    size = pages * config.page_size * bytes_per_token
    if device.type == "cuda" and free is not None and size + work > free:
        problem = f"{gigabytes(size)} for its {bytes_per_token} bytes a token are too many; {room}"
        most = max(0, free - graphs - work) // bytes_per_token
        raise ModelError(describe("kv_cache_tokens", config.kv_cache_tokens, problem, f"Use at most {most}, or none"))
    return Budget(pages, graphs)


def step_bytes(config: EngineConfig, text: Any, dtype: torch.dtype, taps: int = 0) -> int:
    """What one forward of as many rows as are allowed takes besides weights and pool, estimated from shapes."""
    rows = max(config.max_step_tokens, config.max_batch_size + config.max_nodes)
    inner = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    experts = int(getattr(text, "num_experts_per_tok", None) or 1)
    inner *= experts if getattr(text, "moe_intermediate_size", None) is None else 1
    inner = max(inner, experts * int(getattr(text, "moe_intermediate_size", None) or 0))
    states = (HIDDEN_COPIES + taps) * int(text.hidden_size) + 3 * inner
    return rows * (states * dtype.itemsize + LOGIT_COPIES * int(text.vocab_size) * 4) + OTHER_BYTES


def _room(free: int | None, device: torch.device, later: int) -> str:
    beside = f" beside {gigabytes(later)} yet to be loaded" if later else ""
    total = f" of {gigabytes(total_memory(device))}" if device.type == "cuda" else ""
    return f"{gigabytes(free or 0)} free{total}{beside}"


def _graph_bytes(free: int) -> int:
    return min(GRAPH_BYTES, int(free * GRAPH_SHARE))
