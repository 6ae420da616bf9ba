"""Step 3: the training loop. Blocks at random anchors, soft and hard targets, saves every few minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.drafters.checkpoint import DFlashConfig
from cast_ray.request import derive_seed
from cast_ray.training.batches import Batch, Sequences, channel_scale, make_batch
from cast_ray.training.config import TrainConfig
from cast_ray.training.loss import accepted_by_depth, depth_weights, frozen_head_loss, mix_targets
from cast_ray.training.muon import make_optimisers
from cast_ray.training.network import block_hidden, new_network
from cast_ray.training.selector import selector_loss
from cast_ray.training.state import BEFORE_DECAY, TrainingState, rate_factor

HISTORY_EVERY = 10
# A causal block's positions do not depend on those behind them, so a step may train only the first few.
SHORTEST_BLOCK = 4


@dataclass(frozen=True)
class Frozen:
    """What the target lends.

    embedding: `[vocab, H]`; vocabulary: `[V]` int64, the draft vocabulary; head: `[V, H]`, the head's rows of it;
    place: `[vocab]` int64, a token's row there, -1 where it has none.
    """

    embedding: Tensor
    vocabulary: Tensor
    head: Tensor
    place: Tensor

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor, vocabulary: Tensor, dtype: torch.dtype) -> Frozen:
        place = torch.full((embedding.shape[0],), -1, dtype=torch.int64, device=embedding.device)
        place[vocabulary] = torch.arange(len(vocabulary), device=embedding.device)
        return cls(embedding, vocabulary, head[vocabulary].to(dtype), place)


@dataclass(frozen=True)
class Scores:
    """Of one batch. accepted, tried: `[D]` blocks whose first d tokens were right, and that had d tokens."""

    loss: float
    accepted: Tensor
    tried: Tensor

    @property
    def first(self) -> float:
        """Top-1 accuracy at depth 1."""
        return float(self.accepted[0] / self.tried[0].clamp(min=1))

    @property
    def round_length(self) -> float:
        """Expected tokens a round of the top-1 chain: 1 + sum over d of P(first d right)."""
        return 1.0 + float((self.accepted / self.tried.clamp(min=1)).sum())


def fresh_state(
    config: TrainConfig, draft: DFlashConfig, sequences: Sequences, embedding: Tensor, device: torch.device
) -> TrainingState:
    """A state at step 0, whose feature scale is that of the first sequences."""
    network = new_network(draft, embedding, config.seed).to(device).float().train()
    some = torch.cat([sequences[i].features for i in range(min(32, len(sequences)))])
    shape = {
        "architecture": config.architecture,
        "layers": config.layers,
        "block_size": config.block_size,
        "taps": list(draft.taps),
        "intermediate": draft.model.intermediate_size,
        "causal": config.causal,
    }
    optimisers = make_optimisers(network, config.learning_rate, config.weight_decay)
    return TrainingState(network, optimisers, channel_scale(some).to(device), shape)


def train(
    config: TrainConfig,
    draft: DFlashConfig,
    state: TrainingState,
    sequences: Sequences,
    frozen: Frozen,
    dtype: torch.dtype,
    report: Callable[[TrainingState, Scores, float], None],
) -> None:
    """Train until `steps`, or for `minutes`. report: called after every step with state, scores and progress 0..1."""
    folder = config.work_dir / "training"
    plan = _Plan(config, state.seconds)
    if state.decaying and not plan.decays(state.step):
        state.load(folder, BEFORE_DECAY)
        plan = _Plan(config, state.seconds)
    saved, began = time.monotonic(), time.monotonic()
    while (progress := plan.progress(state.step)) < 1.0:
        if not state.decaying and plan.decays(state.step):
            state.save(folder, BEFORE_DECAY)
            state.decaying = True
        factor = rate_factor(state.step, config.warmup, progress, plan.decay_share)
        scores = train_step(config, draft, state, sequences, frozen, dtype, factor)
        state.step += 1
        now = time.monotonic()
        state.seconds, began = state.seconds + now - began, now
        if state.step % HISTORY_EVERY == 0:
            state.history.append((state.step, scores.loss, scores.first, scores.round_length))
        report(state, scores, plan.progress(state.step))
        if now - saved > config.save_every_s:
            state.save(folder)
            saved = time.monotonic()
    state.save(folder)


def train_step(
    config: TrainConfig,
    draft: DFlashConfig,
    state: TrainingState,
    sequences: Sequences,
    frozen: Frozen,
    dtype: torch.dtype,
    factor: float,
) -> Scores:
    """One optimiser step at `factor` of the full learning rate."""
    chance = derive_seed(config.seed, "step", state.step)
    size = draft.block_size
    if config.causal and size > SHORTEST_BLOCK:
        size = SHORTEST_BLOCK + chance % (size - SHORTEST_BLOCK + 1)
    chosen = sequences.at_step(config.seed, state.step, config.sequences)
    batch = make_batch(chosen, config.anchors, size, chance).to(frozen.embedding.device, torch.float32)
    loss, scores = block_loss(config, draft, state, batch, frozen, dtype)
    loss.backward()
    for optimiser, full in zip(state.optimisers, _full_rates(state.optimisers), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = full * factor
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return scores


def draft_hidden(draft: DFlashConfig, state: TrainingState, batch: Batch, frozen: Frozen, dtype: torch.dtype) -> Tensor:
    """Hidden states of the positions behind each root, `[S, A, D, H]` in dtype."""
    device = batch.roots.device
    tokens = torch.full((*batch.roots.shape, batch.labels.shape[2] + 1), draft.mask_token_id, device=device)
    tokens[:, :, 0] = batch.root_tokens
    blocks = torch.nn.functional.embedding(tokens, frozen.embedding).float() * draft.input_scale
    with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
        hidden = block_hidden(state.network, batch.features / state.scale, batch.roots, blocks)
    return hidden[:, :, 1:].to(dtype)


def block_loss(
    config: TrainConfig,
    draft: DFlashConfig,
    state: TrainingState,
    batch: Batch,
    frozen: Frozen,
    dtype: torch.dtype,
) -> tuple[Tensor, Scores]:
    """The loss of a batch, with its graph, and what it says of the drafter."""
    device = batch.roots.device
    depths = batch.labels.shape[2]
    rows = draft_hidden(draft, state, batch, frozen, dtype).flatten(0, 2)

    labels = batch.labels.reshape(-1)
    real = labels >= 0
    weights = depth_weights(depths, config.depth_decay, device).expand(batch.labels.shape).reshape(-1) * real
    drafted = torch.where(real, frozen.place[labels.clamp(min=0)], -1)
    targets = mix_targets(
        drafted,
        frozen.place[batch.soft_ids.flatten(0, 2)],
        batch.soft_probs.flatten(0, 2),
        config.soft_weight,
        weights / weights.sum(),
    )
    selector = state.network.candidate_selector
    loss, best, _ = frozen_head_loss(rows, frozen.head, targets, selector.top_k if selector else 1)
    if selector is None:
        chosen = best[:, 0]
    else:
        previous = torch.cat([batch.root_tokens[:, :, None], batch.labels[:, :, :-1].clamp(min=0)], dim=2).reshape(-1)
        extra, chosen, _ = selector_loss(selector, rows, frozen.head, frozen.vocabulary, previous, best, targets)
        loss = loss + extra
    right = (chosen == drafted).view(-1, depths)
    accepted, tried = accepted_by_depth(right, real.view(-1, depths))
    return loss, Scores(float(loss.detach()), accepted.cpu(), tried.cpu())


def _full_rates(optimisers: list[torch.optim.Optimizer]) -> list[float]:
    """The learning rate that each was made with."""
    return [float(optimiser.defaults["lr"]) for optimiser in optimisers]


class _Plan:
    """How far a run is, and when its learning rate falls.

    With `steps` the fall takes the last `decay_share` of all steps. With `minutes` it takes that share of all the time
    ever trained, this run included, but at most half of this run.
    """

    def __init__(self, config: TrainConfig, trained_s: float) -> None:
        self._steps = config.steps
        self._began = time.monotonic()
        self._seconds = 60.0 * (config.minutes or 60.0)
        self.decay_share = config.decay_share
        if self._steps is None:
            self.decay_share = min(0.5, config.decay_share * (trained_s + self._seconds) / self._seconds)

    def progress(self, step: int) -> float:
        """0 at the beginning, 1 at the end."""
        if self._steps is not None:
            return min(1.0, step / self._steps)
        return min(1.0, (time.monotonic() - self._began) / self._seconds)

    def decays(self, step: int) -> bool:
        """Whether the learning rate falls by now."""
        return self.progress(step) > 1.0 - self.decay_share
