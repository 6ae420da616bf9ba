"""How far a drafter's masses hold: what it promises of its top-1 chain, and how often the target agrees.

Teacher-forced, at random places of held-out answers. What the engine makes of a drafter is measured in `evaluate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cast_ray.drafters.checkpoint import DFlashConfig
from cast_ray.request import derive_seed
from cast_ray.training.batches import Sequences, make_batch
from cast_ray.training.config import TrainConfig
from cast_ray.training.loop import Frozen, draft_hidden
from cast_ray.training.state import TrainingState


@torch.inference_mode()
def chain_reliability(
    config: TrainConfig,
    draft: DFlashConfig,
    state: TrainingState,
    sequences: Sequences,
    frozen: Frozen,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """For each depth: mean mass of the top-1 chain, share of blocks whose chain was right so far, and their number."""
    depths = draft.block_size - 1
    promised, accepted, tried = torch.zeros(3, depths, dtype=torch.float64)
    for start in range(0, len(sequences), config.sequences):
        chosen = [sequences[i] for i in range(start, min(len(sequences), start + config.sequences))]
        batch = make_batch(chosen, config.anchors, draft.block_size, derive_seed(config.seed, "held out", start))
        batch = batch.to(frozen.embedding.device, torch.float32)
        hidden = draft_hidden(draft, state, batch, frozen, dtype).flatten(0, 1)
        tokens, masses = _chain(state.network, hidden, batch.root_tokens.flatten(), frozen)
        labels = batch.labels.flatten(0, 1)
        real = labels >= 0
        promised += (masses * real).sum(dim=0).double().cpu()
        accepted += ((tokens == labels) & real).float().cumprod(dim=1).sum(dim=0).double().cpu()
        tried += real.sum(dim=0).double().cpu()
    rows = zip((promised / tried).tolist(), (accepted / tried).tolist(), tried.tolist(), strict=True)
    return [
        {"depth": depth, "predicted": predicted, "accepted": right, "blocks": int(count)}
        for depth, (predicted, right, count) in enumerate(rows, 1)
    ]


def _chain(network: Any, hidden: Tensor, roots: Tensor, frozen: Frozen) -> tuple[Tensor, Tensor]:
    """The top-1 token of each depth, given the one chosen before it, and the prefix masses.

    hidden: `[n, D, H]`; roots: `[n]` tokens -> two `[n, D]`, tokens of the target's vocabulary.
    """
    selector = network.candidate_selector
    tokens, masses = [], []
    previous, mass = roots, torch.ones(len(roots), device=hidden.device)
    for depth in range(hidden.shape[1]):
        logits = (hidden[:, depth] @ frozen.head.T).float()
        if selector is None:
            chance, row = logits.softmax(dim=-1).max(dim=-1)
        else:
            unary, rows = logits.topk(selector.top_k, dim=-1)
            pairs = selector.pair_scores(hidden[:, depth], previous[:, None], frozen.vocabulary[rows])[:, 0]
            chance, place = (unary + pairs).softmax(dim=-1).max(dim=-1)
            row = rows.gather(1, place[:, None])[:, 0]
        previous, mass = frozen.vocabulary[row], mass * chance
        tokens.append(previous)
        masses.append(mass)
    return torch.stack(tokens, dim=1), torch.stack(masses, dim=1)
