"""Step 5: the drafter in z-lab's public format, with a record of the pair and a model card. Nothing here trains."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cast_ray.drafters.checkpoint import WEIGHTS
from cast_ray.drafters.head import SHORTLIST
from cast_ray.training.files import write_json, write_whole
from cast_ray.training.state import TrainingState


def export(state: TrainingState, config: dict[str, Any], vocabulary: Tensor, folder: Path) -> None:
    """Write config.json, model.safetensors (bfloat16) and the shortlist.

    config: the drafter's config.json, with the record of its pair. vocabulary: tokens that it was trained to propose.
    """
    weights = {name: tensor.detach().clone() for name, tensor in state.network.state_dict().items()}
    # The public format reads features as they are.
    weights["fc.weight"] = weights["fc.weight"] / state.scale
    public = {public_name(name): tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    write_json(folder / "config.json", config)
    write_whole(folder / WEIGHTS, lambda part: save_file(public, part, metadata={"format": "pt"}))
    write_whole(folder / SHORTLIST, lambda part: save_file({"token_ids": vocabulary.cpu()}, part))


def public_name(name: str) -> str:
    """DFlash 2's codebooks are embeddings here and bare tensors in the public format."""
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def model_card(facts: dict[str, Any]) -> str:
    """README.md of a drafter.

    facts: target, command, answers, tokens, steps, minutes, settings, and evaluation (None before there is one).
    """
    settings = facts["settings"]
    lines = [
        f"# A DFlash drafter for {facts['target']}",
        "",
        f"A one-pass block drafter in z-lab's public DFlash format: {settings['layers']} layers, block "
        f"{settings['block_size']}, features of target layers {', '.join(map(str, settings['taps']))}. It uses the "
        "target's own embedding and output head. Trained on text that the target wrote itself "
        f"({facts['answers']} answers, {facts['tokens']} tokens with their prompts), in {facts['steps']} steps of "
        f"{settings['sequences']} sequences with {settings['anchors']} blocks each ({facts['minutes']:.0f} minutes).",
        "",
        "Made by:",
        "",
        f"    {facts['command']}",
        "",
    ]
    if facts["evaluation"]:
        lines += evaluation_tables(facts["evaluation"])
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines += [f"Python {platform.python_version()}, {versions}.", ""]
    return "\n".join(lines)


def evaluation_tables(evaluation: dict[str, Any]) -> list[str]:
    """Round length by domain and width, then predicted mass and acceptance by depth, as Markdown lines."""
    widths = evaluation["widths"]
    about = f"{evaluation['prompts']} held-out prompts, {evaluation['max_tokens']} new tokens, greedy"
    lines = [f"Mean round length on {about}, by domain and nodes verified:", ""]
    lines += [f"| domain | {' | '.join(widths)} |", "| --- |" + " --- |" * len(widths)]
    for domain, lengths in evaluation["round_length"].items():
        lines.append(f"| {domain} | " + " | ".join(f"{lengths[width]:.2f}" for width in widths) + " |")
    lines += [
        "",
        "The top-1 chain at random places of held-out answers: how likely the drafter held its first d tokens,",
    ]
    lines += ["and how often they were all right:", "", "| depth | predicted | accepted |", "| --- | --- | --- |"]
    for row in evaluation["reliability"]:
        lines.append(f"| {row['depth']} | {row['predicted']:.3f} | {row['accepted']:.3f} |")
    return [*lines, ""]


def write_card(facts: dict[str, Any], folder: Path) -> None:
    write_whole(folder / "README.md", lambda part: part.write_text(model_card(facts), encoding="utf-8"))
