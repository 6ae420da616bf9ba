"""Packing captured: some hundred small kernels a round, one for each step of each depth, in one replay.

On a CPU packing runs as it is; here it is only recorded and replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cast_ray.models.recordings import Limits, Recordings
from cast_ray.models.replay import Replay, replays
from cast_ray.trees.pack import DraftScores, pack, pack_chain
from cast_ray.trees.tree import CandidateTree

# Trees of some hundred nodes take little; a share of the engine's room for graphs is left for this.
PACKING_BYTES = 256 << 20


class Packing:
    """`pack` and `pack_chain` for one width of tree; captured: on recordings by the scores' shape."""

    def __init__(self, device: torch.device, *, nodes: int, branching: bool, captured: bool) -> None:
        self._nodes = nodes
        self._branching = branching
        self._captured = captured
        self._recordings: Recordings[_Packed] = Recordings("packing", device, Limits(bytes=PACKING_BYTES))
        self._replays = replays(device)

    def __call__(self, scores: DraftScores) -> CandidateTree:
        """The tree of these scores; a captured one is valid until the next."""
        if not self._captured:
            return self.pack(scores)
        key = (tuple(scores.logprobs.shape), scores.logprobs.dtype, scores.pairwise is not None)
        packed = self._recordings.find(key, lambda: _Packed(self, scores, self._replays()))
        return self.pack(scores) if packed is None else packed.run(scores)

    def pack(self, scores: DraftScores) -> CandidateTree:
        """Packed without a recording."""
        return (pack if self._branching else pack_chain)(scores, self._nodes)


class _Packed:
    """One recording and its buffers."""

    def __init__(self, packing: Packing, scores: DraftScores, replay: Replay) -> None:
        self._packing = packing
        self._replay = replay
        with torch.inference_mode(False):
            buffers = [torch.zeros_like(part) for part in _parts(scores)]
        self._scores = DraftScores(*buffers)
        self._fill(scores)
        self._max_depth = 0
        self._outputs = replay.capture(self._compute)

    def run(self, scores: DraftScores) -> CandidateTree:
        self._fill(scores)
        self._replay.replay()
        tokens, parents, depths, masses, counts = self._outputs
        return CandidateTree(tokens, parents, depths, masses, counts, self._max_depth)

    def _fill(self, scores: DraftScores) -> None:
        for buffer, part in zip(_parts(self._scores), _parts(scores), strict=True):
            buffer.copy_(part)

    @torch.inference_mode()
    def _compute(self) -> tuple[Tensor, ...]:
        tree = self._packing.pack(self._scores)
        self._max_depth = tree.max_depth  # of the shapes alone
        return tree.tokens, tree.parents, tree.depths, tree.masses, tree.counts


def _parts(scores: DraftScores) -> list[Tensor]:
    parts = (scores.logprobs, scores.token_ids, scores.pairwise)
    return [part for part in parts if part is not None]
