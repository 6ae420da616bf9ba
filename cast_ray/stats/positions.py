"""Whether a drafter would know more if its context lay at other positions: seen on the very same roots.

Off by one costs a sound drafter a few hundredths of a token a round, which is lost among rounds that differ anyway. So
the readings are asked at every token of the same texts, and what is compared is the mass that each puts on the tokens
that the target then emits: a number that does not jump with luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cast_ray.drafters.base import DraftContexts, Drafter
from cast_ray.drafters.checkpoint import read_config
from cast_ray.drafters.dflash import load_dflash
from cast_ray.engine.engine import Engine
from cast_ray.request import Prompt, SamplingParams
from cast_ray.stats.acceptance import drafter_of, target_of
from cast_ray.trees.edit import Nodes, read
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.trees.tree import CandidateTree
from cast_ray.width.fixed import FixedWidth

SHIFTS = (-1, 1)
# Candidates a depth and nodes that are looked at for what the target emits; what is not among them has no mass.
CANDIDATES, NODES = 32, 63
# A shift is better beyond this many standard errors, and by this share: neighbouring roots are not independent.
CERTAIN, LEAST = 4.0, 0.02


@dataclass(frozen=True)
class ShiftGain:
    """Means over `roots`: prefix mass on the target's own next tokens, summed over depths, at positions as they are and
    shifted. error: standard error of their difference."""

    shift: int
    own: float
    shifted: float
    error: float
    roots: int

    @property
    def better(self) -> bool:
        """Whether the shifted reading knows more, beyond chance and by enough to matter."""
        gain = self.shifted - self.own
        return gain > max(CERTAIN * self.error, LEAST * self.own)


def compare_shifts(
    engine: Engine, folder: Path, prompts: Sequence[Prompt], params: SamplingParams, shifts: Sequence[int] = SHIFTS
) -> list[ShiftGain]:
    """Decode the prompts greedily, and ask the engine's drafter and shifted copies of it at every root.

    folder: of the engine's own drafter. The engine must share no prefixes: the copies know nothing of cached pages.
    """
    drafter = drafter_of(engine)
    assert drafter is not None
    target = target_of(engine)
    config = read_config(folder)
    slots, page_size = target.cache.slots, engine.config.page_size
    copies: list[Drafter] = [load_dflash(folder, config, target, slots, page_size) for _ in shifts]
    policy = engine.policy
    engine.use_policy(OneByOne())
    outputs: defaultdict[str, list[int]] = defaultdict(list)
    roots: list[tuple[str, int, list[Nodes]]] = []
    try:
        with _beside(drafter, copies, shifts) as trees:
            for number, prompt in enumerate(prompts):
                engine.submit(f"shifted-{number}", prompt, params)
            while engine.has_work:
                events = engine.step()
                if not trees:
                    continue
                found = [read(tree, list(range(tree.batch))) for tree in trees]
                trees.clear()
                for row, event in enumerate(events):
                    roots.append((event.request_id, len(outputs[event.request_id]), [each[row] for each in found]))
                    outputs[event.request_id] += event.token_ids
    finally:
        engine.use_policy(policy)
    if not roots:
        return []
    masses = torch.tensor(
        [[_mass_on(nodes, outputs[name][place:]) for nodes in readings] for name, place, readings in roots],
        dtype=torch.float64,
    )
    gains = masses[:, 1:] - masses[:, :1]
    means, errors = masses.mean(dim=0).tolist(), (gains.std(dim=0, correction=0) / len(roots) ** 0.5).tolist()
    return [
        ShiftGain(shift, means[0], means[1 + place], errors[place], len(roots)) for place, shift in enumerate(shifts)
    ]


class OneByOne(FixedWidth):
    """Drafts in every round and verifies nothing of it, so that every token is a root."""

    def __init__(self) -> None:
        super().__init__("chain", 1, branching=False)

    def choose(self, tree: CandidateTree, shape: object) -> Tensor:
        return torch.zeros_like(tree.counts)


@contextmanager
def _beside(drafter: Drafter, copies: Sequence[Drafter], shifts: Sequence[int]) -> Iterator[list[CandidateTree]]:
    """While inside, the copies see and are asked what the drafter is: the trees of a round, the drafter's first."""
    trees: list[CandidateTree] = []
    observe, propose, forget = drafter.observe, drafter.propose, drafter.forget

    def observe_all(features: Tensor, slots: Tensor, positions: Tensor) -> None:
        observe(features, slots, positions)
        for copy, shift in zip(copies, shifts, strict=True):
            copy.observe(features, slots, positions + shift)

    def propose_all(contexts: DraftContexts, top_k: int) -> DraftScores:
        scores = [each(contexts, CANDIDATES) for each in (propose, *(copy.propose for copy in copies))]
        trees.extend(pack(each, NODES) for each in scores)
        return scores[0]

    def forget_all(pages: list[int]) -> None:
        forget(pages)
        for copy in copies:
            copy.forget(pages)

    drafter.observe, drafter.propose, drafter.forget = observe_all, propose_all, forget_all  # type: ignore[method-assign]
    try:
        yield trees
    finally:
        for name in ("observe", "propose", "forget"):
            delattr(drafter, name)  # the methods of its class show again


def _mass_on(nodes: Nodes, tokens: Sequence[int]) -> float:
    """Prefix masses of the nodes along `tokens`, summed: what the tree promises of just this text."""
    total, here = 0.0, -1
    children = {
        (parent, token): place for place, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True))
    }
    for token in tokens:
        found = children.get((here, token))
        if found is None:
            break
        total, here = total + nodes.masses[found], found
    return total
