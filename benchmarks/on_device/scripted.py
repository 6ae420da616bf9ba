"""A stand-in drafter whose proposals are accepted at the paper's rates, at the cost of a real one.

It runs a DFlash network with random weights and puts its own candidates in the place of what comes out: the target's
next tokens, which are known (`shapes`), among others, at ranks drawn from what it says of itself. So its masses are
honest. How sure it is differs from round to round, as drafters do.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts
from cast_ray.drafters.dflash import DFlashDrafter
from cast_ray.trees.pack import DraftScores, pack
from on_device.shapes import STRIDE

PAPER = Path(__file__).resolve().parents[3] / "shared" / "data" / "paper" / "round_length.csv"
# Where the tables are not at hand: means over their three domains, Qwen3-8B on an H100, chain and 127 nodes.
CHAIN_LENGTH, TREE_LENGTH, TREE_NODES = 5.60, 7.67, 127
# Spread of how sure it is, in logits; and by what share each further candidate's probability falls.
SPREAD, FALL = 1.2, 0.5


@dataclass(frozen=True)
class Rates:
    """certainty: logit of the best candidate's probability in a middling round. covered: of the rest, the share that
    lies among the other candidates. source: where the round lengths that they are fitted to come from."""

    certainty: float
    covered: float
    source: str

    def probabilities(self, noise: Tensor, candidates: int) -> Tensor:
        """Of each candidate to be the target's: noise `[B]`, standard normal -> `[B, candidates]`."""
        best = torch.sigmoid(self.certainty + SPREAD * noise)[:, None]
        ranks = torch.arange(candidates - 1, device=noise.device)
        rest = (1 - best) * self.covered * (1 - FALL) * FALL**ranks
        return torch.cat([best, rest], dim=1)


def fit_rates(depths: int, nodes: int = TREE_NODES) -> Rates:
    """Rates at which a chain and the widest tree commit as many tokens a round as in the paper, on average."""
    chain, tree, source = _paper()
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0))

    def length(certainty: float, covered: float, width: int) -> float:
        q = Rates(certainty, covered, source).probabilities(noise, 32)
        if width == 0:
            return 1 + float((q[:, :1] ** torch.arange(1, depths + 1)).sum(1).mean())
        scores = q.log()[:, None].expand(-1, depths, -1).contiguous()
        ids = torch.arange(32).expand_as(scores).contiguous()
        return 1 + float(pack(DraftScores(scores, ids), width).masses.sum(1).mean())

    certainty = _bisect(lambda x: length(x, 0.9, 0), chain, -3.0, 8.0)
    covered = _bisect(lambda x: length(certainty, x, nodes), tree, 0.0, 1.0)
    return Rates(certainty, covered, source)


class ScriptedDrafter:
    """See the module. `inner` is run for its time."""

    def __init__(self, inner: DFlashDrafter, rates: Rates, vocab_size: int, seed: int = 0) -> None:
        self.inner = inner
        self.rates = rates
        self.block_size = inner.block_size
        self.taps = inner.taps
        self._vocab = vocab_size
        device = inner.cache.data.device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._depths = torch.arange(1, self.block_size, device=device)

    def shape(self) -> dict[str, Any]:
        return self.inner.shape()

    def observe(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        self.inner.observe(features, slots, positions)

    def forget(self, pages: list[int]) -> None:
        self.inner.forget(pages)

    def propose(self, contexts: DraftContexts, top_k: int) -> DraftScores:
        real = self.inner.propose(contexts, top_k)
        batch, depths, candidates = real.logprobs.shape
        draw = {"generator": self._generator, "device": real.logprobs.device}
        # A chain asks for one candidate: whether it is right is drawn from the same odds.
        q = self.rates.probabilities(torch.randn(batch, **draw), max(candidates, 2))
        ends = q.cumsum(dim=1)[:, None]
        drawn = torch.rand(batch, depths, 1, **draw)
        rank = (drawn >= ends).sum(dim=2, keepdim=True)  # behind the last: none of the candidates is right
        right = (contexts.roots[:, None] + self._depths * STRIDE)[..., None]
        others = torch.arange(1, candidates + 1, device=rank.device)
        tokens = torch.where(others - 1 == rank, right, right + others) % self._vocab
        logprobs = q[:, None, :candidates].log().expand(-1, depths, -1)
        return DraftScores(logprobs.contiguous(), tokens)


def _paper() -> tuple[float, float, str]:
    try:
        lines = PAPER.read_text(encoding="utf-8").splitlines()
        rows = [row for row in csv.DictReader(lines[1:]) if row["setting"] == "h100sxm-qwen3-8b"]
        chain = statistics.mean(float(row["R"]) for row in rows if row["N"] == "0")
        tree = statistics.mean(float(row["R"]) for row in rows if int(row["N"]) == TREE_NODES)
    except (OSError, KeyError, ValueError):
        return CHAIN_LENGTH, TREE_LENGTH, "the paper's means for Qwen3-8B on an H100, built in"
    return chain, tree, "the paper's tables for Qwen3-8B on an H100, means over domains"


def _bisect(value: Any, wanted: float, low: float, high: float) -> float:
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return (low + high) / 2
