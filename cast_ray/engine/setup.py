"""From an EngineConfig to the parts of an engine: target, drafter, pool and latency table. Runs once, at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cast_ray.calibration.measure import DeviceProfile
from cast_ray.config import EngineConfig
from cast_ray.drafters.base import Drafter
from cast_ray.drafters.checkpoint import EMBEDDED, DFlashConfig, check_pair, find_drafter, read_config
from cast_ray.drafters.dflash import load_dflash
from cast_ray.drafters.lookup import MAX_DEPTH, Lookup, split_name
from cast_ray.drafters.pair import check_record, recorded_acceptance
from cast_ray.engine.capture import capture
from cast_ray.engine.memory import share_out
from cast_ray.errors import ConfigError, describe
from cast_ray.models.attention.choose import Choice, Heads, choose_backend
from cast_ray.models.devices import resolve_device, resolve_dtype
from cast_ray.models.families import check_family, is_recurrent
from cast_ray.models.fit import weight_bytes
from cast_ray.models.fused import speed_up
from cast_ray.models.kv_cache import KVCache
from cast_ray.models.loading import LoadedTarget, load_target
from cast_ray.models.recurrent import state_bytes
from cast_ray.models.target import ATTENTION_NAME, Target, kv_shape, short_context
from cast_ray.models.text_decoder import text_alone
from cast_ray.width.latency import DraftPoint, LatencyTable
from cast_ray.width.policy import WidthPolicy, make_policy, needs_latency
from cast_ray.width.prior import AcceptanceRecord

# What the width policies take for the time of lookup alone, ms; what it really takes is a part of the host's.
LOOKUP_MS = 0.01
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `latency` is None where the width policy does not ask for it.

    scratch: token places that every decoding request needs behind its tokens; tree_places: that the widest tree needs.
    attention: the backend, and why it is this one.
    notes: where the target makes the engine do otherwise than its settings say, and why.
    record: what the drafter's folder says of its acceptance, None where it says nothing.
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
    attention: Choice
    notes: tuple[str, ...] = ()
    lookup: Lookup | None = None
    record: AcceptanceRecord | None = None


def build(config: EngineConfig) -> Parts:
    """Load and measure. Raises ConfigError, ModelError or DrafterError, each with a remedy."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    pair = find_pair(config)
    # A width that cannot be used is said before anything is loaded.
    looking_up = split_name(config.drafter)[1]
    block_size = pair[1].block_size if pair else MAX_DEPTH + 1 if looking_up else None
    spec = config.width if block_size or not needs_latency(config.width) else "ar"
    measured = needs_latency(spec)
    if not measured:
        make_policy(spec, block_size=block_size, max_nodes=config.max_nodes, latency=None)

    loaded = load_target(
        config.target,
        dtype,
        device,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=ATTENTION_NAME,
        check=check_family,
    )
    loaded = text_alone(loaded)
    text = loaded.model.config.get_text_config()
    layers, kv_heads, head_dim = kv_shape(text)
    notes: list[str] = []
    if is_recurrent(text):
        spec = without_trees(config, spec, block_size is not None, notes)
        measured = needs_latency(spec)
    if pair:
        check_pair(
            pair[1],
            pair[0],
            hidden_size=text.hidden_size,
            layers=int(text.num_hidden_layers),
            vocab_size=text.vocab_size,
            target=loaded.name,
        )
        check_record(pair[0], pair[1], loaded)
    speed_up(loaded.model)
    dtype = loaded.model.dtype  # float32 where a CPU emulates bfloat16: then only the weights are kept in 16 bits
    max_context = _max_context(config, loaded)
    # Plain decoding has nobody to show features to, and verifies only what a grammar foresees.
    plain = spec == "ar"
    tree_places = max(config.max_nodes + 1, pair[1].block_size if pair else 0)
    scratch = 1 if plain else tree_places
    per_token = KVCache.bytes_per_token(layers, kv_heads, head_dim, dtype)
    if pair:
        draft = pair[1].model
        per_token += KVCache.bytes_per_token(draft.num_hidden_layers, draft.num_key_value_heads, draft.head_dim, dtype)
    states = config.max_batch_size * state_bytes(text, dtype)
    taps = pair[1].taps if pair and not plain else ()
    choice = _attention(config, text, pair[1] if pair else None, device, dtype)
    budget = share_out(
        config,
        text,
        max_context=max_context,
        scratch=scratch,
        bytes_per_token=per_token,
        dtype=dtype,
        device=device,
        taps=len(taps),
        later=states + (weight_bytes(pair[0], dtype) if pair else 0),
    )
    num_pages = budget.num_pages
    slots = num_pages * config.page_size

    target = Target(loaded, choice.backend, slots, taps, rows=config.max_batch_size)
    drafter = load_dflash(pair[0], pair[1], target, slots, config.page_size) if pair else None
    capture(config, target, drafter, plain=plain, room=budget.graph_bytes)
    latency = DeviceProfile(config, target, drafter, max_context).table() if measured else None
    record = recorded_acceptance(pair[0]) if pair else None
    policy = make_policy(
        spec, block_size=block_size, max_nodes=config.max_nodes, latency=policy_table(latency), record=record
    )
    lookup = None
    if looking_up and not plain:
        lookup = Lookup(config.max_batch_size, max_context, config.lookup_tokens)
    drafter_name = _drafter_name(config, pair is not None)
    return Parts(
        loaded,
        target,
        drafter,
        drafter_name,
        policy,
        latency,
        device,
        max_context,
        num_pages,
        scratch,
        tree_places,
        choice,
        tuple(notes),
        lookup,
        record,
    )


def policy_table(latency: LatencyTable | None) -> LatencyTable | None:
    """The table as width policies want it: where only lookup drafts, with a drafter that takes no time."""
    if latency is None or latency.draft:
        return latency
    draft = [DraftPoint(1, latency.base_context, LOOKUP_MS)]
    return LatencyTable(latency.verify, draft, latency.host_ms, latency.buckets)


def _drafter_name(config: EngineConfig, paired: bool) -> str:
    name, looking_up = split_name(config.drafter)
    parts = [config.target if name == "auto" else str(name)] if paired else []
    return "+".join(parts + ["lookup"] * looking_up) or "none"


def _attention(
    config: EngineConfig, text: Any, draft: DFlashConfig | None, device: torch.device, dtype: torch.dtype
) -> Choice:
    """The attention backend, which target and drafter share; said in the log, as a warning where a GPU goes without."""
    window, softcap = (getattr(text, name, None) for name in ("sliding_window", "attn_logit_softcapping"))
    heads = [Heads(int(text.num_attention_heads), *kv_shape(text)[1:], window, softcap)]
    if draft is not None:
        model = draft.model
        heads.append(Heads(int(model.num_attention_heads), int(model.num_key_value_heads), int(model.head_dim)))
    choice = choose_backend(config.attention, config.page_size, device, dtype, heads)
    wanting = device.type == "cuda" and choice.name == "sdpa" and config.attention == "auto"
    logger.log(logging.WARNING if wanting else logging.INFO, "attention: %s (%s)", choice.name, choice.reason)
    return choice


def without_trees(config: EngineConfig, spec: str, drafts: bool, notes: list[str]) -> str:
    """The width for a target with a recurrent state: a chain, or plain decoding. Notes what cannot be kept."""
    chosen = spec if spec in ("ar", "chain") else "chain" if drafts else "ar"
    why = f"target {config.target!r} has linear-attention layers, whose state belongs to one path of tokens"
    if chosen != config.width:
        notes.append(f"{why}: width {config.width!r} becomes {chosen!r}")
    if config.prefix_cache:
        notes.append(f"{why}: requests share no prefixes")
    for note in notes:
        logger.warning(note)
    return chosen


def find_pair(config: EngineConfig) -> tuple[Path, DFlashConfig] | None:
    """Folder and config of the drafter, or None to decode without one."""
    name, looking_up = split_name(config.drafter)
    if name == "auto":
        name = EMBEDDED if config.target == EMBEDDED else "none"
        if name == "none" and not looking_up:
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
