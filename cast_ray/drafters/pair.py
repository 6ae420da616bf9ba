"""The record of a drafter's pair, in its config.json: which target it was trained for, and on which of its layers.

Some mismatches cost too little acceptance to be seen in it, so they are said at load. A drafter without a record, such
as a public one, is taken at its word. Nothing here looks at acceptance; `engine.health` does.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from cast_ray.drafters.checkpoint import DFlashConfig
from cast_ray.errors import DrafterError, describe
from cast_ray.models.loading import LoadedTarget, target_fingerprint
from cast_ray.width.prior import AcceptanceRecord

# Beside `dflash_config`: other loaders of the format keep what they do not know and do not mind it.
RECORD = "cast_ray_pair"
# In it: acceptance on held-out prompts, see `width.prior`. Drafters without it are believed until rounds say otherwise.
ACCEPTANCE = "reliability"
# Weights of each tensor that go into the hash.
SAMPLES = 4096
CHECK = "Run `cast-ray check-drafter` to see what it costs, or train one for this target with `cast-ray train-drafter`"
logger = logging.getLogger(__name__)


def pair_record(config: dict[str, Any], loaded: LoadedTarget) -> dict[str, Any]:
    """What a drafter was made for, as plain values. config: the drafter's config.json."""
    shape = target_fingerprint(loaded)
    return {
        "target": shape.pop("name"),
        "shape": shape,
        "weights_sha256": weights_hash(loaded),
        "target_layer_ids": config["dflash_config"]["target_layer_ids"],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "chat_template_sha256": template_hash(loaded),
    }


def weights_hash(loaded: LoadedTarget) -> str | None:
    """A hash of some of every tensor in bfloat16, the dtype in which two copies of one model agree; None for a target
    whose weights were not read (`models.loading.load_outline`).

    Fine-tuned or quantised weights differ in it. Milliseconds: a few thousand weights of each tensor are read.
    """
    if loaded.model.device.type == "meta":
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(loaded.model.state_dict().items()):
        values = tensor.flatten()
        some = values[:: max(1, values.numel() // SAMPLES)][:SAMPLES].to("cpu", torch.bfloat16)
        digest.update(f"{name}:{tuple(tensor.shape)}".encode())
        digest.update(some.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def template_hash(loaded: LoadedTarget) -> str | None:
    """Of the target's chat template, None where it has none."""
    template = loaded.tokenizer.chat_template
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_record(folder: Path, config: DFlashConfig, loaded: LoadedTarget) -> list[str]:
    """Hold the drafter's record against its own config and the loaded target, before its layers are swapped.

    Returns what may cost acceptance, each also logged as a warning. DrafterError where the config reads other layers
    or another mask token than the weights were trained with: nobody wants that, and acceptance may hardly show it.
    """
    record = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(RECORD)
    if record is None:
        return []
    if not isinstance(record, dict):
        return _warn([describe(f"{folder / 'config.json'}: {RECORD}", record, "is no mapping and is ignored", CHECK)])
    _refuse_other_inputs(folder, config, record)
    return _warn(_differences(folder, record, loaded))


def recorded_acceptance(folder: Path) -> AcceptanceRecord | None:
    """What the drafter's record says of its masses; None without one. A damaged one is named in the log and ignored."""
    path = folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8")).get(RECORD)
    if not isinstance(record, dict) or record.get(ACCEPTANCE) is None:
        return None
    try:
        return AcceptanceRecord.from_dict(record[ACCEPTANCE])
    except DrafterError as error:
        logger.warning("%s: %s.%s is ignored: %s", path, RECORD, ACCEPTANCE, error)
        return None


def _refuse_other_inputs(folder: Path, config: DFlashConfig, record: dict[str, Any]) -> None:
    stated = {"target_layer_ids": list(config.taps), "mask_token_id": config.mask_token_id}
    for field, value in stated.items():
        trained = record.get(field, value)
        if trained != value:
            problem = f"the drafter was trained with {trained}"
            remedy = f"Set {field} back to {trained}, or remove {RECORD} to use it so all the same"
            raise DrafterError(f"{folder / 'config.json'}: {describe(field, value, problem, remedy)}")


def _differences(folder: Path, record: dict[str, Any], loaded: LoadedTarget) -> list[str]:
    where, made_for = f"drafter={str(folder)!r}", repr(record.get("target"))
    shape = target_fingerprint(loaded)
    recorded = record.get("shape")
    other = {k: v for k, v in recorded.items() if shape.get(k) != v} if isinstance(recorded, dict) else {}
    found = []
    if other:
        sides = ", ".join(f"{name} {value} (here {shape.get(name)})" for name, value in sorted(other.items()))
        found.append(f"{where}: it was trained for another model, {made_for}: {sides}. {CHECK}")
    elif (here := weights_hash(loaded)) is not None and record.get("weights_sha256") not in (None, here):
        problem = f"it was trained for {made_for} with other weights than target {loaded.name!r} has here"
        found.append(f"{where}: {problem} (another fine-tune or another quantisation). {CHECK}")
    if "chat_template_sha256" in record and record["chat_template_sha256"] != template_hash(loaded):
        found.append(f"{where}: it was trained with another chat template than target {loaded.name!r} has. {CHECK}")
    return found


def _warn(messages: list[str]) -> list[str]:
    for message in messages:
        logger.warning(message)
    return messages
