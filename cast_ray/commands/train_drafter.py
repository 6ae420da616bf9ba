"""`cast-ray train-drafter`. Options only: `training.config` says what they mean, `training.driver` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cast_ray.commands.options import option
from cast_ray.errors import ConfigError, describe
from cast_ray.settings import load_settings
from cast_ray.training.config import TrainConfig


def train_drafter(
    target: Annotated[str | None, option(TrainConfig, "target")] = None,
    prompts: Annotated[Path | None, option(TrainConfig, "prompts")] = None,
    work: Annotated[Path | None, option(TrainConfig, "work")] = None,
    output: Annotated[Path | None, option(TrainConfig, "output")] = None,
    answers: Annotated[int | None, option(TrainConfig, "answers")] = None,
    own_share: Annotated[float | None, option(TrainConfig, "own_share")] = None,
    held_out: Annotated[int | None, option(TrainConfig, "held_out")] = None,
    evaluated: Annotated[int | None, option(TrainConfig, "evaluated")] = None,
    answer_tokens: Annotated[int | None, option(TrainConfig, "answer_tokens")] = None,
    sampled_share: Annotated[float | None, option(TrainConfig, "sampled_share")] = None,
    temperature: Annotated[float | None, option(TrainConfig, "temperature")] = None,
    max_tokens: Annotated[int | None, option(TrainConfig, "max_tokens")] = None,
    replicas: Annotated[int | None, option(TrainConfig, "replicas")] = None,
    batch_size: Annotated[int | None, option(TrainConfig, "batch_size")] = None,
    architecture: Annotated[str | None, option(TrainConfig, "architecture")] = None,
    layers: Annotated[int | None, option(TrainConfig, "layers")] = None,
    block_size: Annotated[int | None, option(TrainConfig, "block_size")] = None,
    taps: Annotated[
        str | None, typer.Option(help="Target layers that it reads, as 1,8,14 (default: five, spread evenly).")
    ] = None,
    intermediate: Annotated[int | None, option(TrainConfig, "intermediate")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Block positions see only those before them.")] = False,
    start_from: Annotated[str | None, option(TrainConfig, "start_from")] = None,
    steps: Annotated[int | None, option(TrainConfig, "steps")] = None,
    minutes: Annotated[float | None, option(TrainConfig, "minutes")] = None,
    sequences: Annotated[int | None, option(TrainConfig, "sequences")] = None,
    anchors: Annotated[int | None, option(TrainConfig, "anchors")] = None,
    learning_rate: Annotated[float | None, option(TrainConfig, "learning_rate")] = None,
    decay_share: Annotated[float | None, option(TrainConfig, "decay_share")] = None,
    depth_decay: Annotated[float | None, option(TrainConfig, "depth_decay")] = None,
    soft_weight: Annotated[float | None, option(TrainConfig, "soft_weight")] = None,
    draft_vocab: Annotated[int | None, option(TrainConfig, "draft_vocab")] = None,
    save_every_s: Annotated[float | None, option(TrainConfig, "save_every_s")] = None,
    seed: Annotated[int | None, option(TrainConfig, "seed")] = None,
    dtype: Annotated[str | None, option(TrainConfig, "dtype")] = None,
    device: Annotated[str | None, option(TrainConfig, "device")] = None,
    threads: Annotated[int | None, option(TrainConfig, "threads")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
) -> None:
    """Train a DFlash drafter for any causal LM, from prompts alone.

    The target answers the prompts, and others that it writes itself; a drafter learns from that text, is written in
    z-lab's public format, and evaluated on answers that were held out.
    Killed at any moment, the same command goes on where it stopped. With --minutes each run trains that much longer.

    Examples:

      cast-ray train-drafter --target embedded --prompts prompts.jsonl --steps 50

      cast-ray train-drafter --target Qwen/Qwen3-0.6B --prompts prompts.jsonl --minutes 120 --output my-drafter

      cast-ray train-drafter --target ./my-model --own-share 1 --answers 2000 --layers 2 --block-size 6

      cast-ray train-drafter --start-from embedded --prompts prompts.jsonl --learning-rate 0.002 --minutes 60

      ray job submit --working-dir . -- python jobs/train_drafter.py --config train.yaml
    """
    said = {name: value for name, value in locals().items() if name not in ("config", "taps", "causal")}
    said["taps"] = _layers(taps)
    said["causal"] = causal or None
    settings = load_settings(TrainConfig, config, {name: value for name, value in said.items() if value is not None})

    from cast_ray.training.driver import run_training  # torch and the models: not for --help

    run_training(settings)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        remedy = "Write layer numbers with commas, as 1,8,14"
        raise ConfigError(describe("taps", text, "is no list of layers", remedy)) from None
