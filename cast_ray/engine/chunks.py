"""Prompt chunks that ride along in a step's forward: what they bring to it, and what becomes of their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cast_ray.drafters.base import Drafter
from cast_ray.engine.scheduler import Chunk, Plan
from cast_ray.engine.scoring import score_prompt
from cast_ray.models.attention.base import Step
from cast_ray.models.flatten import PromptChunk
from cast_ray.models.target import TargetOutput


def prompt_chunks(plan: Plan, tables: Tensor) -> list[PromptChunk]:
    """The plan's chunks as the forward takes them."""
    return [
        PromptChunk(chunk.sequence.tokens[chunk.start : chunk.end], chunk.start, tables[row], row)
        for chunk in plan.chunks
        for row in (chunk.sequence.row,)
    ]


def logit_rows(plan: Plan, tree_rows: int, device: torch.device) -> Tensor:
    """Rows of the forward whose logits are wanted: all of trees, those of chunks to be scored."""
    trees, start = torch.arange(tree_rows, device=device), tree_rows
    scored = [trees]
    for chunk in plan.chunks:
        end = start + chunk.end - chunk.start
        if _scored(chunk):
            scored.append(torch.arange(start, end, device=device))
        start = end
    return torch.cat(scored) if len(scored) > 1 else trees


def commit_chunks(plan: Plan, step: Step, first_row: int, output: TargetOutput, drafter: Drafter | None) -> None:
    """Chunks are in the cache: their features go to the drafter, their logits to those who want them scored.

    first_row: of the chunks in the forward, and of their logits in its output.
    """
    first_logits = first_row
    for chunk in plan.chunks:
        chunk.sequence.cached = chunk.end
        if _scored(chunk):
            logits = output.logits[first_logits : (first_logits := first_logits + chunk.end - chunk.start)]
            score_prompt(chunk.sequence, chunk.start, logits)
    if drafter is not None and output.features is not None and plan.chunks:
        rows = slice(first_row, None)
        drafter.observe(output.features[rows], step.slots[rows], step.positions[rows])


def _scored(chunk: Chunk) -> bool:
    """Whether the chunk's own logits are wanted, which are those of the prompt's next tokens."""
    return chunk.sequence.emitting is not None and chunk.sequence.emitting.missing_prompt_logprobs
