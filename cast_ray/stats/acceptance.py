"""Watches an engine decode: what its drafter promised of each round, by depth, and what the target accepted.

It looks through the engine's own drafter and events, so what is measured is what a job would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.engine.engine import Engine
from cast_ray.models.target import Target
from cast_ray.request import Prompt, SamplingParams
from cast_ray.trees.pack import DraftScores, pack_chain
from cast_ray.width.prior import AcceptanceRecord


@dataclass(frozen=True)
class Acceptance:
    """Of the top-1 chain. predicted: mean prefix mass at depths 1, 2, …; accepted: share of rounds that got there.

    spread: standard deviation of the accepted tokens of one round. rounds: request-rounds watched.
    """

    rounds: int
    predicted: tuple[float, ...]
    accepted: tuple[float, ...]
    spread: float

    @property
    def round_length(self) -> float:
        """Mean committed tokens a round."""
        return 1.0 + sum(self.accepted)

    @property
    def promised(self) -> float:
        """The mean round length that the masses promised."""
        return 1.0 + sum(self.predicted)

    @property
    def error(self) -> float:
        """Standard error of the round length."""
        return self.spread / max(self.rounds, 1) ** 0.5


class Proposals:
    """Keeps what a drafter proposed last; None where it was not asked since `take`."""

    def __init__(self) -> None:
        self._last: DraftScores | None = None

    def take(self) -> DraftScores | None:
        """The scores of the round that has just run."""
        last, self._last = self._last, None
        return last

    def keep(self, scores: DraftScores) -> DraftScores:
        self._last = scores
        return scores


@contextmanager
def watched(drafter: Drafter) -> Iterator[Proposals]:
    """While inside, what this drafter proposes is kept too."""
    proposals, propose = Proposals(), drafter.propose

    def watching(contexts: DraftContexts, top_k: int) -> DraftScores:
        return proposals.keep(propose(contexts, top_k))

    drafter.propose = watching  # type: ignore[method-assign]
    try:
        yield proposals
    finally:
        del drafter.propose  # the method of its class shows again


def drafter_of(engine: Engine) -> Drafter | None:
    """The drafter that this engine decodes with."""
    return engine._parts.drafter


def target_of(engine: Engine) -> Target:
    """The target that this engine decodes with."""
    return engine._parts.target


def record_of(engine: Engine) -> AcceptanceRecord | None:
    """What the folder of this engine's drafter says of its acceptance."""
    return engine._parts.record


def chain_acceptance(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> Acceptance:
    """Decode the prompts together on an engine of width `chain`, and count by depth.

    A request's last round is left out: it was cut at the request's end.
    """
    drafter = drafter_of(engine)
    assert drafter is not None
    masses: list[torch.Tensor] = []
    lengths: list[int] = []
    for number, prompt in enumerate(prompts):
        engine.submit(f"watched-{number}", prompt, params)
    with watched(drafter) as proposals:
        while engine.has_work:
            events = engine.step()
            scores = proposals.take()
            if scores is None:
                continue
            chains = pack_chain(scores, scores.logprobs.shape[1]).masses
            for row, event in enumerate(events):
                if event.completion is None:
                    masses.append(chains[row].cpu())
                    lengths.append(len(event.token_ids) - 1)
    if not lengths:
        return Acceptance(0, (), (), 0.0)
    accepted = torch.tensor(lengths, dtype=torch.float64)
    depths = torch.arange(1, masses[0].shape[0] + 1)
    return Acceptance(
        rounds=len(lengths),
        predicted=tuple(torch.stack(masses).double().mean(dim=0).tolist()),
        accepted=tuple((accepted[:, None] >= depths).double().mean(dim=0).tolist()),
        spread=float(accepted.std(correction=0)),
    )
