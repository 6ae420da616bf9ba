"""A drafter to go on from: its weights in place of random ones. What a new network has beside them starts fresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cast_ray.drafters.checkpoint import WEIGHTS, find_drafter, read_config
from cast_ray.errors import ConfigError, DrafterError, describe
from cast_ray.training.export import public_name

# Sizes of the network that must be those of the drafter to go on from.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def check_start(name: str, asked: dict[str, Any]) -> None:
    """ConfigError where the drafter called `name` has another shape than the one to be trained.

    asked: the new drafter's config.json.
    """
    known = read_config(find_drafter(name))
    sizes: dict[str, tuple[Any, Any]] = {size: (getattr(known.model, size), asked[size]) for size in _SIZES}
    sizes["taps"] = (list(known.taps), asked["dflash_config"]["target_layer_ids"])
    different = [f"{size} {there}, asked for {here}" for size, (there, here) in sizes.items() if there != here]
    if different:
        remedy = "Ask for the same with --layers, --intermediate and --taps, or start without one"
        raise ConfigError(describe("start_from", name, f"is of another shape: {'; '.join(different)}", remedy))


def mask_token_of(name: str) -> int:
    """The mask token that the drafter called `name` knows: its weights expect that embedding."""
    return read_config(find_drafter(name)).mask_token_id


def start_from(name: str, network: Any, scale: Tensor) -> list[str]:
    """Copy the weights of the drafter called `name` into a new network, which reads features divided by `scale`.

    DFlash 2's own parts start as if they were not there, so a DFlash 2 network goes on from a DFlash one unchanged.
    Returns the names of the tensors that the drafter has none for.
    """
    path: Path = find_drafter(name) / WEIGHTS
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        remedy = "Give a DFlash folder with safetensors weights"
        raise DrafterError(describe("start_from", str(path), f"cannot be read ({error})", remedy)) from None
    state, fresh = network.state_dict(), []
    for key, tensor in state.items():
        found = weights.get(public_name(key))
        if found is None or found.shape != tensor.shape:
            fresh.append(key)
            continue
        found = found.to(tensor.device, tensor.dtype)
        # The public format reads features as they are.
        tensor.copy_(found * scale if key == "fc.weight" else found)
    return fresh
