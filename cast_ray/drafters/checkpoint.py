"""DFlash and DFlash 2 checkpoints on disk: z-lab's public format, read and checked against the target of the drafter.

`config.json` is a Qwen3 config with a `dflash_config`; `model.safetensors` holds the weights. Embedding and output head
are the target's own and are not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import Qwen3Config

from cast_ray.errors import DrafterError, describe

EMBEDDED = "embedded"
EMBEDDED_FOLDER = "smollm2-135m-dflash"
WEIGHTS = "model.safetensors"
DFLASH2_ARCHITECTURE = "DFlash2DraftModel"


@dataclass(frozen=True)
class DFlash2Config:
    """What a DFlash 2 checkpoint says beside the rest, under the format's own names.

    conv_kernel_size: rows that a convolution sees, its own included. conv_group_size: channels that share a dynamic
    kernel. selector_rank: width of the codebooks. selector_top_k: candidates a depth, over which scores are normalised.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash checkpoint says of itself.

    block_size: B, positions of a block, the root included. taps: target layers whose output is a feature.
    causal: whether a block position sees only those before it; None leaves it to the layer (sliding layers are causal).
    input_scale, output_multiplier, softcap: factors on the raw embedding and the draft logits, and the logits' cap.
    dflash2: of a DFlash 2 checkpoint; None is DFlash.
    """

    model: Qwen3Config
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    causal: bool | None
    input_scale: float
    output_multiplier: float
    softcap: float | None
    dflash2: DFlash2Config | None = None


def find_drafter(name: str) -> Path:
    """The folder of a drafter: `embedded`, a folder, or a hub id (fetched into Hugging Face's cache)."""
    if name == EMBEDDED:
        return Path(str(resources.files("cast_ray") / "data" / "drafters" / EMBEDDED_FOLDER))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise DrafterError(
            describe(
                "drafter", name, "is no folder", "Give a DFlash folder, a hub id (owner/name), 'embedded' or 'none'"
            )
        )
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # the hub's client raises many kinds; each means that the drafter cannot be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DrafterError(
            describe("drafter", name, f"cannot be fetched from the hub ({reason})", "Check the id, or give a folder")
        ) from None


def read_config(folder: Path) -> DFlashConfig:
    """Read `config.json`; DrafterError names what is missing or out of range."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model = Qwen3Config.from_dict(raw)
    except (OSError, ValueError, TypeError) as error:
        raise DrafterError(
            describe("drafter", str(path), f"cannot be read ({error})", "Give a folder in z-lab's DFlash format")
        ) from None
    block = raw.get("dflash_config") or {}

    def value(name: str, default: Any = None) -> Any:
        found = block.get(name, raw.get(name))
        return default if found is None else found

    mask_token_id = value("mask_token_id")
    taps = value("target_layer_ids")
    if mask_token_id is None:
        raise _bad(path, "mask_token_id", None, "is missing", "Add it under dflash_config")
    if taps is None:
        taps = _default_taps(path, raw.get("num_target_layers"), model.num_hidden_layers)
    if not isinstance(taps, list) or not taps or not all(isinstance(t, int) and t >= 0 for t in taps):
        raise _bad(
            path, "target_layer_ids", taps, "must be a list of target layers from 0", "See the drafter's model card"
        )
    block_size = value("block_size", 16)
    if not isinstance(block_size, int) or block_size < 2:
        raise _bad(path, "block_size", block_size, "must be at least 2", "See the drafter's model card")
    softcap = value("final_logit_softcapping")
    causal = raw.get("is_causal")  # beside dflash_config, not in it
    return DFlashConfig(
        model=model,
        block_size=block_size,
        mask_token_id=int(mask_token_id),
        taps=tuple(taps),
        causal=None if causal is None else bool(causal),
        input_scale=float(value("input_embedding_scale", 1.0)),
        output_multiplier=float(value("output_multiplier", 1.0)),
        softcap=float(softcap) if softcap is not None and float(softcap) > 0 else None,
        dflash2=_read_dflash2(path, value, model, DFLASH2_ARCHITECTURE in (raw.get("architectures") or [])),
    )


def check_pair(
    config: DFlashConfig, source: Path, *, hidden_size: int, layers: int, vocab_size: int, target: str
) -> None:
    """DrafterError where the drafter cannot have been made for a target of this shape; the message shows both sides."""
    problems = []
    if config.model.hidden_size != hidden_size:
        problems.append(f"its hidden_size is {config.model.hidden_size}, the target's is {hidden_size}")
    if max(config.taps) >= layers:
        problems.append(f"it reads target layer {max(config.taps)}, the target has layers 0 to {layers - 1}")
    made_for = getattr(config.model, "num_target_layers", None)
    if made_for is not None and made_for != layers:
        problems.append(f"it was made for a target of {made_for} layers, this one has {layers}")
    if config.model.vocab_size != vocab_size:
        problems.append(f"its vocabulary has {config.model.vocab_size} tokens, the target's has {vocab_size}")
    if not 0 <= config.mask_token_id < vocab_size:
        problems.append(f"its mask_token_id {config.mask_token_id} is outside the target's {vocab_size} tokens")
    if problems:
        remedy = "Give the drafter that was trained for this target, or drafter='none' to decode without one"
        raise DrafterError(
            describe("drafter", str(source), f"does not match target {target!r}: {'; '.join(problems)}", remedy)
        )


def _read_dflash2(path: Path, value: Callable[[str], Any], model: Any, named: bool) -> DFlash2Config | None:
    """None where the config neither names the architecture nor has any of its values."""
    values = {field.name: value(field.name) for field in fields(DFlash2Config)}
    if not named and all(size is None for size in values.values()):
        return None
    for name, size in values.items():
        if size is None:
            raise _bad(path, name, None, "is missing, and this is a DFlash 2 drafter", "Add it under dflash_config")
        if not isinstance(size, int) or size < 1:
            raise _bad(path, name, size, "must be a whole number of at least 1", "See the drafter's model card")
    config = DFlash2Config(**values)
    if model.hidden_size % config.conv_group_size:
        problem = f"does not divide the hidden_size of {model.hidden_size}"
        raise _bad(path, "conv_group_size", config.conv_group_size, problem, "See the drafter's model card")
    if config.selector_top_k > model.vocab_size:
        problem = f"is more than the {model.vocab_size} tokens of the vocabulary"
        raise _bad(path, "selector_top_k", config.selector_top_k, problem, "See the drafter's model card")
    return config


def _default_taps(path: Path, target_layers: Any, draft_layers: int) -> list[int]:
    """The format's own rule where the config names no layers: evenly from layer 1 to the third from the end."""
    if not isinstance(target_layers, int):
        raise _bad(path, "target_layer_ids", None, "is missing, and so is num_target_layers", "Add either")
    if draft_layers == 1:
        return [target_layers // 2]
    span = target_layers - 4
    return [round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers)]


def _bad(path: Path, field: str, value: object, problem: str, remedy: str) -> DrafterError:
    return DrafterError(f"{path}: {describe(field, value, problem, remedy)}")
