"""The whole job, step by step: answers, features, training, export, evaluation. Each step skips what is done.

What can be found wrong beforehand is found before the first step. The steps themselves are in modules of their own.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cast_ray.errors import InputError, describe
from cast_ray.models.loading import LoadedTarget, load_target, resolve_device, resolve_dtype
from cast_ray.models.target import ATTENTION_NAME
from cast_ray.training.answers import Answer, read_answers, write_answers
from cast_ray.training.batches import Sequences
from cast_ray.training.config import TrainConfig
from cast_ray.training.drafter_config import drafter_config, lent, write_config
from cast_ray.training.evaluate import evaluate
from cast_ray.training.export import export, write_card
from cast_ray.training.features import claim_features, write_features
from cast_ray.training.files import read_json, sweep_parts, write_json
from cast_ray.training.loop import fresh_state, train
from cast_ray.training.progress import TrainingProgress, step_report
from cast_ray.training.prompts import read_prompts
from cast_ray.training.state import TrainingState


def run_training(config: TrainConfig, console: Console | None = None) -> Path:
    """Train a drafter and return its folder. Run again after a kill, it goes on where it was.

    Raises InputError, ConfigError, ModelError before any work, and EngineError where the engines fail.
    """
    console = console or Console(stderr=True)
    given = read_prompts(config.prompts) if config.prompts is not None else []
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    loaded = load_target(config.target, dtype, device, attn_implementation=ATTENTION_NAME)
    drafter_config(config, loaded, set())  # layers and taps that do not fit are said now
    work = config.work_dir
    work.mkdir(parents=True, exist_ok=True)
    sweep_parts(work)
    console.print(f"target {config.target} ({dtype}, {device}), work folder {work}", highlight=False, soft_wrap=True)

    write_answers(config, given, loaded.tokenizer, step_report(console))
    sequences = _features(config, loaded, console)
    seen = {token for _, part in read_answers(work) for a in part for token in (*a.prompt_ids, *a.token_ids)}
    known = read_json(work / "training" / "config.json")
    if known is not None:  # a mask token once chosen stays, whatever later data holds
        seen.discard(known["dflash_config"]["mask_token_id"])
    draft = write_config(config, loaded, seen, work / "training")
    state = fresh_state(config, draft, sequences, device)
    if state.load(work / "training"):
        console.print(f"going on from step {state.step}", highlight=False)
    embedding, head = lent(loaded)
    with TrainingProgress(console, config) as progress:
        train(config, draft, state, sequences, embedding, head, dtype, progress.step)
    raw = read_json(work / "training" / "config.json")
    export(state, raw, loaded, config.output_dir)
    progress.plot(state, config.output_dir)
    held_out = [answer for _, part in read_answers(work, "held_out") for answer in part][: config.held_out]
    _finish(config, state, loaded, held_out, raw, console)
    return config.output_dir


def _features(config: TrainConfig, loaded: LoadedTarget, console: Console) -> Sequences:
    taps = tuple(drafter_config(config, loaded, set())["dflash_config"]["target_layer_ids"])
    claim_features(config.work_dir, {"taps": list(taps), "top": config.soft_top})
    write_features(
        loaded,
        taps,
        config.work_dir,
        top=config.soft_top,
        max_tokens=config.max_tokens,
        report=step_report(console),
    )
    sequences = Sequences.of(config.work_dir)
    if not len(sequences):
        problem = "gave no answer of at least two tokens to train on"
        raise InputError(describe("prompts", str(config.prompts), problem, "Give more prompts, or more --answers"))
    return sequences


def _finish(
    config: TrainConfig,
    state: TrainingState,
    loaded: LoadedTarget,
    held_out: list[Answer],
    raw: dict[str, Any],
    console: Console,
) -> None:
    """Evaluation of the exported folder, once for these weights, and the model card."""
    output = config.output_dir
    facts = {
        "target": config.target,
        "command": " ".join(shlex.quote(part) for part in _command()),
        "answers": sum(len(part) for _, part in read_answers(config.work_dir)),
        "tokens": sum((read_json(config.work_dir / "features" / "tokens.json") or {}).values()),
        "steps": state.step,
        "minutes": state.seconds / 60,
        "settings": {
            **config.model_dump(mode="json"),
            "taps": raw["dflash_config"]["target_layer_ids"],
        },
        "evaluation": None,
    }
    write_card(facts, output)
    if held_out:
        known = read_json(output / "evaluation.json")
        if known is None or known["step"] != state.step:
            known = {"step": state.step, **evaluate(config, held_out, output, step_report(console))}
            write_json(output / "evaluation.json", known)
        facts["evaluation"] = known
        write_card(facts, output)
    console.print(f"the drafter is in {output}", highlight=False, soft_wrap=True)


def _command() -> list[str]:
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
