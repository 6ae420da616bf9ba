"""From an EngineConfig to the parts of an engine: target, drafter, pool and latency table. Runs once, at start."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from cast_ray.calibration.measure import DeviceProfile
from cast_ray.config import EngineConfig
from cast_ray.drafters.base import Drafter
from cast_ray.drafters.checkpoint import EMBEDDED, DFlashConfig, check_pair, find_drafter, read_config
from cast_ray.drafters.dflash import load_dflash
from cast_ray.drafters.pair import check_record
from cast_ray.errors import ConfigError, ModelError, describe
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.fused import speed_up
from cast_ray.models.kv_cache import KVCache
from cast_ray.models.loading import LoadedTarget, load_target, resolve_device, resolve_dtype
from cast_ray.models.target import ATTENTION_NAME, Target, kv_shape, short_context
from cast_ray.width.latency import LatencyTable
from cast_ray.width.policy import WidthPolicy, make_policy, needs_latency

MEMORY_SHARE = 0.25
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `latency` is None where the width policy does not ask for it.

    scratch: token places that every decoding request needs behind its tokens; tree_places: that the widest tree needs.
    """

    loaded: LoadedTarget
    target: Target
    drafter: Drafter | None
    drafter_name: str  # what was loaded, `none` without one
    policy: WidthPolicy
    latency: LatencyTable | None
    device: torch.device
    max_context: int
    num_pages: int
    scratch: int
    tree_places: int


def build(config: EngineConfig) -> Parts:
    """Load and measure. Raises ConfigError, ModelError or DrafterError, each with a remedy."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    pair = _find_pair(config)
    # A width that cannot be used is said before anything is loaded.
    block_size = pair[1].block_size if pair else None
    spec = config.width if pair or not needs_latency(config.width) else "ar"
    measured = needs_latency(spec)
    if not measured:
        make_policy(spec, block_size=block_size, max_nodes=config.max_nodes, latency=None)

    loaded = load_target(
        config.target,
        dtype,
        device,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=ATTENTION_NAME,
    )
    text = loaded.model.config.get_text_config()
    layers, kv_heads, head_dim = kv_shape(text)
    if pair:
        check_pair(
            pair[1],
            pair[0],
            hidden_size=text.hidden_size,
            layers=layers,
            vocab_size=text.vocab_size,
            target=loaded.name,
        )
        check_record(pair[0], pair[1], loaded)
    speed_up(loaded.model)
    dtype = loaded.model.dtype  # float32 where a CPU emulates bfloat16: then only the weights are kept in 16 bits
    max_context = _max_context(config, loaded)
    # Plain decoding has nobody to show features to, and verifies only what a grammar foresees.
    plain = spec == "ar"
    tree_places = max(config.max_nodes + 1, block_size or 0)
    scratch = 1 if plain else tree_places
    per_token = KVCache.bytes_per_token(layers, kv_heads, head_dim, dtype)
    if pair:
        draft = pair[1].model
        per_token += KVCache.bytes_per_token(draft.num_hidden_layers, draft.num_key_value_heads, draft.head_dim, dtype)
    num_pages = _num_pages(config, max_context, scratch, per_token, device)
    slots = num_pages * config.page_size

    target = Target(loaded, SdpaBackend(config.page_size), slots, taps=pair[1].taps if pair and not plain else ())
    drafter = load_dflash(pair[0], pair[1], target, slots, config.page_size) if pair else None
    latency = DeviceProfile(config, target, drafter, max_context).table() if measured else None
    policy = make_policy(spec, block_size=block_size, max_nodes=config.max_nodes, latency=latency)
    drafter_name = "none" if pair is None else config.target if config.drafter == "auto" else str(config.drafter)
    return Parts(
        loaded, target, drafter, drafter_name, policy, latency, device, max_context, num_pages, scratch, tree_places
    )


def _find_pair(config: EngineConfig) -> tuple[Path, DFlashConfig] | None:
    """Folder and config of the drafter, or None to decode without one."""
    name = config.drafter
    if name == "auto":
        name = EMBEDDED if config.target == EMBEDDED else "none"
        if name == "none":
            logger.warning("no drafter is known for target %r: decoding without one; see --drafter", config.target)
    if name is None or name == "none":
        return None
    folder = find_drafter(name)
    return folder, read_config(folder)


def _max_context(config: EngineConfig, loaded: LoadedTarget) -> int:
    most = loaded.max_context
    fixed = short_context(loaded.model.config.get_text_config())
    if fixed is not None and fixed < most:
        most = fixed
        logger.warning("target %r: contexts end at %d tokens, where its rotary frequencies change", loaded.name, most)
    if config.max_context is None:
        return most
    if config.max_context > most:
        problem = f"is more than the {most} tokens that target {loaded.name!r} can hold here"
        raise ConfigError(describe("max_context", config.max_context, problem, f"Use at most {most}"))
    return config.max_context


def _num_pages(config: EngineConfig, max_context: int, scratch: int, bytes_per_token: int, device: torch.device) -> int:
    """Pages of the pool: what was asked for, else a share of the free memory and no more than can be used."""
    wanted = config.max_batch_size * (max_context + scratch)
    if config.kv_cache_tokens is not None:
        wanted = config.kv_cache_tokens
    else:
        free = _free_memory(device)
        if free is not None:
            wanted = min(wanted, int(free * MEMORY_SHARE) // bytes_per_token)
    pages = wanted // config.page_size
    least = -(-(2 + scratch) // config.page_size)  # a prompt of one token, an answer of one
    if pages < least:
        problem = f"{wanted} tokens of {bytes_per_token} bytes are too few for one request"
        remedy = f"Free some memory, or set kv_cache_tokens to {least * config.page_size} or more"
        raise ModelError(describe("kv_cache_tokens", config.kv_cache_tokens, problem, remedy))
    return pages


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return None
