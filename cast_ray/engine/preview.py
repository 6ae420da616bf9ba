"""What an engine would be made of, without reading weights or measuring: for a plan that is looked at before a job.

It refuses what `setup.build` refuses before it reads weights, and holds the pair's record against the target's shape
and chat template. Whether memory and device suffice is known only where the engine will run.
"""

from __future__ import annotations

from dataclasses import dataclass

from cast_ray.config import EngineConfig
from cast_ray.drafters.checkpoint import check_pair
from cast_ray.drafters.lookup import MAX_DEPTH, split_name
from cast_ray.drafters.pair import check_record
from cast_ray.engine.setup import find_pair, without_trees
from cast_ray.models.families import check_family, is_recurrent
from cast_ray.models.loading import load_outline
from cast_ray.width.policy import make_policy, needs_latency


@dataclass(frozen=True)
class Preview:
    """In words: the target, the drafter and the width that would be used."""

    target: str
    drafter: str
    width: str


def preview(config: EngineConfig) -> Preview:
    """Raises ConfigError, ModelError or DrafterError, each with a remedy. What merely costs speed is logged."""
    pair = find_pair(config)
    looking_up = split_name(config.drafter)[1]
    block_size = pair[1].block_size if pair else MAX_DEPTH + 1 if looking_up else None
    spec = config.width if block_size or not needs_latency(config.width) else "ar"
    if not needs_latency(spec):
        make_policy(spec, block_size=block_size, max_nodes=config.max_nodes, latency=None)
    loaded = load_outline(config.target, trust_remote_code=config.trust_remote_code, check=check_family)
    text = loaded.model.config.get_text_config()
    if is_recurrent(text):
        spec = without_trees(config, spec, block_size is not None, [])
    names = ["lookup"] if looking_up else []
    if pair:
        folder, drafter = pair
        check_pair(
            drafter,
            folder,
            hidden_size=text.hidden_size,
            layers=int(text.num_hidden_layers),
            vocab_size=text.vocab_size,
            target=loaded.name,
        )
        check_record(folder, drafter, loaded)
        kind = "DFlash 2" if drafter.dflash2 else "DFlash"
        names.insert(0, f"{folder} ({kind}, {drafter.block_size - 1} tokens deep)")
    size = sum(tensor.numel() for tensor in loaded.model.parameters()) / 1e6
    return Preview(
        target=f"{loaded.source} ({text.model_type}, {size:.0f} million weights)",
        drafter=" and ".join(names) or "none",
        width=spec if spec == config.width else f"{spec}, and not {config.width}",
    )
