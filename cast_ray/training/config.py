"""Settings of a training job, and where its work folder is. What the steps do with them is in their own modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from cast_ray.config import Settings, cache_dir
from cast_ray.errors import ConfigError, describe

LEAST_ANSWERS = 1000


class TrainConfig(Settings):
    """One drafter for one target."""

    target: str = Field("embedded", description="HF folder, hub id, .gguf file, or 'embedded'")
    prompts: Path | None = Field(
        None, description="JSONL with messages or prompt, and perhaps a domain; without it the target writes its own"
    )
    work: Path | None = Field(None, description="folder of answers, features and weights on the way")
    output: Path | None = Field(None, description="folder of the finished drafter; default: WORK/drafter")

    answers: int | None = Field(None, ge=1, description="answers to train on; default: one a prompt, at least 1000")
    own_share: float = Field(
        0.5, ge=0, le=1, description="share of the prompts that the target writes itself; all, once no others are left"
    )
    held_out: int = Field(64, ge=0, description="answers kept out of training, for evaluation")
    evaluated: int = Field(30, ge=0, description="how many of those the finished drafter is tried on; 0: none")
    answer_tokens: int = Field(192, ge=8, description="most tokens of an answer")
    sampled_share: float = Field(0.5, ge=0, le=1, description="share of the answers that are sampled, not greedy")
    temperature: float = Field(0.8, gt=0, description="temperature of the sampled answers")
    max_tokens: int = Field(1_000_000, ge=64, description="most tokens whose features are kept on disk")
    replicas: int | None = Field(None, ge=1, description="engine actors on Ray that answer; default: in this process")
    batch_size: int = Field(32, ge=1, description="requests that an engine answers together")

    architecture: Literal["dflash", "dflash2"] = Field("dflash", description="the drafter's network")
    layers: int = Field(3, ge=1, le=64, description="layers of the drafter")
    block_size: int = Field(8, ge=2, le=64, description="positions of a block, the root included")
    taps: tuple[int, ...] | None = Field(None, description="target layers that it reads; default: five, spread evenly")
    intermediate: int | None = Field(None, ge=8, description="width of its MLP; default: the target's")
    causal: bool = Field(False, description="block positions see only those before them")
    start_from: str | None = Field(
        None, description="drafter to go on from, a folder or 'embedded'; default: random weights"
    )

    steps: int | None = Field(None, ge=1, description="optimiser steps in all")
    minutes: float | None = Field(None, gt=0, description="minutes to train for in this run")
    sequences: int = Field(4, ge=1, description="answers of one step")
    anchors: int = Field(32, ge=1, description="blocks drawn from each of them")
    learning_rate: float = Field(5e-3, gt=0, description="Muon's, for matrices; AdamW takes a tenth for the norms")
    warmup: int = Field(10, ge=0, description="steps until the full learning rate")
    decay_share: float = Field(0.25, ge=0, le=1, description="share at the end over which it falls to zero")
    weight_decay: float = Field(0.1, ge=0, description="of the matrices")
    depth_decay: float = Field(4.0, gt=0, description="loss weight of depth d is exp(-(d-1)/this)")
    soft_weight: float = Field(0.7, ge=0, le=1, description="weight of the target's distribution beside its token")
    soft_top: int = Field(24, ge=1, description="tokens kept of the target's distribution")
    draft_vocab: int = Field(8192, ge=16, description="most frequent tokens that the loss is taken over")
    save_every_s: float = Field(120.0, gt=0, description="seconds between two saves")

    seed: int = Field(0, ge=0, lt=2**63, description="seed of the whole job")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of the forward passes")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:I")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: PyTorch's own choice")

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is not None and self.minutes is not None:
            raise ConfigError(describe("minutes", self.minutes, "and steps are both given", "Give one of them"))
        return self

    @property
    def work_dir(self) -> Path:
        """`work`, or a folder named for the target in the user's cache."""
        if self.work is not None:
            return self.work
        name = re.sub(r"[^\w.-]+", "-", Path(self.target).name or self.target).strip("-")
        return cache_dir() / "training" / name

    def wanted_answers(self, given: int) -> int:
        """Answers to train on: as many as asked for, else one a given prompt and at least 1000, but no more than the
        steps see twice."""
        if self.answers is not None:
            return self.answers
        wanted = max(LEAST_ANSWERS, given)
        return wanted if self.steps is None else min(wanted, max(1, self.steps * self.sequences // 2))

    @property
    def output_dir(self) -> Path:
        return self.output if self.output is not None else self.work_dir / "drafter"
