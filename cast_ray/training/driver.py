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

from cast_ray.drafters.pair import RECORD, pair_record
from cast_ray.errors import InputError, describe
from cast_ray.models.devices import resolve_device, resolve_dtype
from cast_ray.models.families import check_family
from cast_ray.models.fused import speed_up
from cast_ray.models.loading import LoadedTarget, load_target
from cast_ray.models.target import ATTENTION_NAME
from cast_ray.training.answers import read_answers, write_answers
from cast_ray.training.batches import Sequences, draft_vocabulary
from cast_ray.training.config import TrainConfig
from cast_ray.training.drafter_config import drafter_config, lent, write_config
from cast_ray.training.evaluate import evaluate, record
from cast_ray.training.export import export, write_card
from cast_ray.training.features import TOKENS, claim_features, write_features
from cast_ray.training.files import read_json, sweep_parts, write_json
from cast_ray.training.loop import Frozen, fresh_state, train
from cast_ray.training.progress import TrainingProgress, step_report
from cast_ray.training.prompts import read_prompts
from cast_ray.training.reliability import chain_reliability
from cast_ray.training.shards import Answer
from cast_ray.training.start import check_start, start_from


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
    loaded = load_target(config.target, dtype, device, attn_implementation=ATTENTION_NAME, check=check_family)
    asked = drafter_config(config, loaded, set())
    if config.start_from is not None:
        check_start(config.start_from, asked)
    taps = tuple(asked["dflash_config"]["target_layer_ids"])
    work = config.work_dir
    work.mkdir(parents=True, exist_ok=True)
    sweep_parts(work)
    console.print(f"target {config.target} ({dtype}, {device}), work folder {work}", highlight=False, soft_wrap=True)

    write_answers(config, given, loaded.tokenizer, step_report(console))
    answers = list(read_answers(work))
    held_out = list(read_answers(work, "held_out"))
    seen = {token for _, part in answers for a in part for token in (*a.prompt_ids, *a.token_ids)}
    draft = write_config(config, loaded, seen, work / "training")
    raw = read_json(work / "training" / "config.json")
    pair = pair_record(raw, loaded)
    speed_up(loaded.model)  # last of all that reads the plain weights is their record
    sequences = _features(config, loaded, taps, answers, work / "features", console)
    if not len(sequences):
        problem = "gave no answer of at least two tokens to train on"
        raise InputError(describe("prompts", str(config.prompts), problem, "Give more prompts, or more --answers"))
    greedy = [(number, [answer for answer in part if not answer.temperature]) for number, part in held_out]
    unseen = _features(config, loaded, taps, greedy, work / "held_out_features", console)

    embedding, head = lent(loaded)
    state = fresh_state(config, draft, sequences, embedding, device)
    if state.load(work / "training"):
        console.print(f"going on from step {state.step}", highlight=False)
    elif config.start_from is not None:
        fresh = start_from(config.start_from, state.network, state.scale)
        console.print(f"starting from {config.start_from}, with {len(fresh)} new tensors", highlight=False)
    vocabulary = draft_vocabulary(work, config.draft_vocab, embedding.shape[0]).to(device)
    frozen = Frozen.of(embedding, head, vocabulary, dtype)
    with TrainingProgress(console, config) as progress:
        train(config, draft, state, sequences, frozen, dtype, progress.step)

    export(state, {**raw, RECORD: pair}, vocabulary, config.output_dir)
    progress.plot(state, config.output_dir)
    facts = {
        "target": config.target,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "answers": sum(len(part) for _, part in answers),
        "tokens": sum((read_json(work / "features" / TOKENS) or {}).values()),
        "steps": state.step,
        "minutes": state.seconds / 60,
        "settings": {**config.model_dump(mode="json"), "taps": taps},
        "evaluation": None,
    }
    write_card(facts, config.output_dir)
    if held_out and config.evaluated:
        prompts = [answer for _, part in held_out for answer in part][: config.evaluated]
        found: dict[str, Any] = evaluate(config, prompts, config.output_dir, step_report(console))
        found["reliability"] = chain_reliability(config, draft, state, unseen, frozen, dtype)
        write_json(config.output_dir / "evaluation.json", {"step": state.step, **found})
        write_card({**facts, "evaluation": found}, config.output_dir)
        record(config, prompts, config.output_dir, step_report(console))
    console.print(f"the drafter is in {config.output_dir}", highlight=False, soft_wrap=True)
    return config.output_dir


def _features(
    config: TrainConfig,
    loaded: LoadedTarget,
    taps: tuple[int, ...],
    shards: list[tuple[int, list[Answer]]],
    folder: Path,
    console: Console,
) -> Sequences:
    claim_features(folder, {"taps": list(taps), "top": config.soft_top})
    write_features(
        loaded,
        taps,
        shards,
        folder,
        top=config.soft_top,
        max_tokens=config.max_tokens,
        report=step_report(console),
    )
    return Sequences.of(folder)
