"""From sequences on disk to the tensors of one training step: which sequences, which anchors, what is to be said.

All chance is keyed by (seed, step), so a run that is resumed sees what an unbroken one would have seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cast_ray.request import derive_seed
from cast_ray.training.answers import read_answers
from cast_ray.training.features import FeatureShard, TrainingSequence, feature_shards


@dataclass(frozen=True)
class Batch:
    """S sequences with A blocks of B positions each, D = B - 1.

    features: `[S, C, taps * hidden]`, zero-padded; roots: `[S, A]` int64 positions; root_tokens: `[S, A]` int64.
    labels: `[S, A, D]` int64 tokens of the target's vocabulary, -1 past the end of the answer.
    soft_ids, soft_probs: `[S, A, D, k]`, the target's best tokens there.
    """

    features: Tensor
    roots: Tensor
    root_tokens: Tensor
    labels: Tensor
    soft_ids: Tensor
    soft_probs: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On a device, with features of that dtype."""
        features = self.features.to(device, dtype, non_blocking=True)
        others = (self.roots, self.root_tokens, self.labels, self.soft_ids, self.soft_probs)
        return Batch(features, *(value.to(device, non_blocking=True) for value in others))


class Sequences:
    """The sequences of a folder of features, by number."""

    def __init__(self, shards: list[FeatureShard]) -> None:
        self._places = [(shard, i) for shard in shards for i in range(len(shard.prompts))]

    @classmethod
    def of(cls, folder: Path) -> Sequences:
        return cls(feature_shards(folder))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> TrainingSequence:
        return TrainingSequence(*self._places[number])

    def at_step(self, seed: int, step: int, count: int) -> list[TrainingSequence]:
        """The `count` sequences of a step: consecutive ones of an endless row of shuffled epochs."""
        chosen = []
        for place in range(step * count, (step + 1) * count):
            epoch, index = divmod(place, len(self))
            generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
            chosen.append(int(torch.randperm(len(self), generator=generator)[index]))
        return [self[number] for number in chosen]


def make_batch(sequences: list[TrainingSequence], anchors: int, size: int, seed: int) -> Batch:
    """Blocks of `size` positions at random anchors: any token from the prompt's last to the answer's last but one."""
    generator = torch.Generator().manual_seed(seed)
    depths = size - 1
    columns: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for item in sequences:
        length, first = len(item.tokens), item.prompt - 1
        choices = length - 1 - first
        # Each anchor once where there are enough, else all of them evenly often.
        order = torch.cat([torch.randperm(choices, generator=generator) for _ in range(-(-anchors // choices))])
        roots = first + order[:anchors]
        places = roots[:, None] + 1 + torch.arange(depths)
        inside = places < length
        places = places.clamp(max=length - 1)
        labels = item.tokens[places].masked_fill(~inside, -1)
        soft = places - item.prompt
        columns.append((roots, item.tokens[roots], labels, item.soft_ids[soft], item.soft_probs[soft]))
    roots, root_tokens, labels, soft_ids, soft_probs = (torch.stack(part) for part in zip(*columns, strict=True))
    # The context that any block sees: everything before the furthest root.
    contexts = [int(row.max()) for row in roots]
    features = sequences[0].features.new_zeros(len(sequences), max(contexts), sequences[0].features.shape[1])
    for row, (item, context) in enumerate(zip(sequences, contexts, strict=True)):
        features[row, :context] = item.features[:context]
    return Batch(features, roots, root_tokens, labels, soft_ids, soft_probs)


def draft_vocabulary(work: Path, size: int, vocab_size: int) -> Tensor:
    """The `size` tokens that answers use most, ascending, `[<= size]` int64.

    Where they use fewer, the rest are those of lowest id: in most tokenizers the earliest merges, the commonest pieces.
    """
    counts: Counter[int] = Counter()
    for _, answers in read_answers(work):
        for answer in answers:
            counts.update(answer.token_ids)
    best = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(best))


def channel_scale(features: Tensor) -> Tensor:
    """Typical size of each feature, `[taps * hidden]` float32.

    The median, because a few tokens (the first of all, mostly) are a thousand times larger than the rest.
    """
    return features.float().abs().median(dim=0).values.mul(1.4826).clamp(min=1e-4)
