"""Step 2: the target's features of every answer, and what it thought of each token, computed once and kept on disk.

A shard of answers becomes shards of features, read back by memory mapping. Only the target runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cast_ray.errors import ConfigError, describe
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.flatten import PromptChunk, make_step
from cast_ray.models.loading import LoadedTarget
from cast_ray.models.target import Target
from cast_ray.training.answers import Report
from cast_ray.training.files import read_json, shard_path, write_json, write_whole
from cast_ray.training.shards import SHARD_ROWS, Answer

PAGE = 16
FORWARD_TOKENS = 1536
# Features of fewer than two next tokens teach nothing.
LEAST_ANSWER = 2
TOKENS = "tokens.json"


@dataclass(frozen=True)
class FeatureShard:
    """One file. offsets: `[n + 1]` first token of each sequence; prompts: `[n]` prompt tokens of each."""

    path: Path
    offsets: list[int]
    prompts: list[int]


class TrainingSequence:
    """One prompt with its answer.

    tokens: `[L]` int64; prompt: prompt tokens P; features: `[L, taps * hidden]`; soft_ids `[L - P, k]` int64 and
    soft_probs `[L - P, k]` float32: the target's best tokens for positions P..L-1.
    """

    __slots__ = ("features", "prompt", "soft_ids", "soft_probs", "tokens")

    def __init__(self, shard: FeatureShard, index: int) -> None:
        start, end = shard.offsets[index], shard.offsets[index + 1]
        self.prompt = shard.prompts[index]
        first = start - sum(shard.prompts[:index])
        last = first + (end - start - self.prompt)
        with safe_open(shard.path, framework="pt") as file:
            self.tokens = file.get_slice("tokens")[start:end].long()
            self.features = file.get_slice("features")[start:end]
            self.soft_ids = file.get_slice("soft_ids")[first:last].long()
            self.soft_probs = file.get_slice("soft_probs")[first:last].float()


def write_features(
    loaded: LoadedTarget,
    taps: tuple[int, ...],
    shards: list[tuple[int, list[Answer]]],
    folder: Path,
    *,
    top: int,
    max_tokens: int,
    report: Report,
) -> None:
    """Fill `folder` with the features of these shards of answers, until it holds `max_tokens` tokens.

    loaded: with the engine's own attention. top: tokens kept of the target's distribution at each place.
    """
    done: dict[str, int] = read_json(folder / TOKENS) or {}
    target: Target | None = None
    for number, answers in shards:
        if sum(done.values()) >= max_tokens:
            break
        if str(number) in done:
            continue
        if target is None:
            longest = max(len(a.prompt_ids) + len(a.token_ids) for _, part in shards for a in part)
            # Every sequence starts on a page of its own.
            slots = FORWARD_TOKENS + longest + SHARD_ROWS * PAGE
            target = Target(loaded, SdpaBackend(PAGE), slots, taps, rows=SHARD_ROWS)
        usable = [a for a in answers if len(a.token_ids) >= LEAST_ANSWER]
        if usable:
            tensors = _compute(target, usable, top)
            write_whole(shard_path(folder, number, ".safetensors"), partial(save_file, tensors))
        done[str(number)] = sum(len(a.prompt_ids) + len(a.token_ids) for a in usable)
        write_json(folder / TOKENS, done)
        report("features", len(done), len(shards))


def feature_shards(folder: Path) -> list[FeatureShard]:
    """What is on disk, in order."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets, prompts = file.get_tensor("offsets").tolist(), file.get_tensor("prompts").tolist()
        found.append(FeatureShard(path, offsets, prompts))
    return found


@torch.inference_mode()
def _compute(target: Target, answers: list[Answer], top: int) -> dict[str, Tensor]:
    parts = [_forward(target, group, top) for group in _groups(answers)]
    lengths = torch.tensor([0] + [len(a.prompt_ids) + len(a.token_ids) for a in answers])
    features, soft_ids, soft_probs = (torch.cat(column) for column in zip(*parts, strict=True))
    return {
        "features": features,
        "soft_ids": soft_ids,
        "soft_probs": soft_probs,
        "tokens": torch.tensor([t for a in answers for t in [*a.prompt_ids, *a.token_ids]], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompts": torch.tensor([len(a.prompt_ids) for a in answers]),
    }


def _groups(answers: list[Answer]) -> Iterator[list[Answer]]:
    """Consecutive answers of at most FORWARD_TOKENS tokens together, at least one."""
    group: list[Answer] = []
    size = 0
    for answer in answers:
        length = len(answer.prompt_ids) + len(answer.token_ids)
        if group and size + length > FORWARD_TOKENS:
            yield group
            group, size = [], 0
        group.append(answer)
        size += length
    yield group


def _forward(target: Target, answers: list[Answer], top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features `[T, taps * hidden]` bfloat16 of all tokens; best tokens and probabilities `[answer tokens, top]`."""
    chunks, rows, page, row = [], [], 0, 0
    for number, answer in enumerate(answers):
        tokens = [*answer.prompt_ids, *answer.token_ids]
        pages = -(-len(tokens) // PAGE)
        chunks.append(PromptChunk(tokens, 0, torch.arange(page, page + pages, device=target.device), number))
        rows.append(torch.arange(row + len(answer.prompt_ids) - 1, row + len(tokens) - 1))
        page, row = page + pages, row + len(tokens)
    output = target.forward(make_step(None, chunks, PAGE), torch.cat(rows).to(target.device))
    assert output.features is not None
    probabilities, ids = output.logits.float().softmax(dim=-1).topk(top, dim=-1)
    return output.features.to("cpu", torch.bfloat16), ids.to("cpu", torch.int32), probabilities.to("cpu", torch.float16)


def choose_taps(layers: int, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """`wanted`, or five target layers spread from the second to the third from the end (fewer in a small target)."""
    if wanted is not None:
        return wanted
    count = min(5, layers)
    if count == 1:
        return (0,)
    first, last = (1, layers - 3) if layers >= 8 else (0, layers - 1)
    return tuple(dict.fromkeys(round(first + i * (last - first) / (count - 1)) for i in range(count)))


def claim_features(folder: Path, settings: dict[str, Any]) -> None:
    """Note how the features of a folder are made; ConfigError where they were made otherwise."""
    path = folder / "settings.json"
    known = read_json(path)
    if known is None:
        write_json(path, settings)
    elif known != settings:
        problem = f"holds features made with {known}, not with {settings}"
        raise ConfigError(describe("work", str(folder), problem, "Use the same settings, or another --work"))
