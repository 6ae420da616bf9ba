"""One decoding round taken apart: its tree, what was accepted of it, what the chain would have given, why this width.

It watches an engine decode one request. How it looks on a terminal is `explain_view`'s.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cast_ray.engine.engine import Engine
from cast_ray.errors import ConfigError, describe
from cast_ray.request import Prompt, SamplingParams
from cast_ray.stats.acceptance import Proposals, drafter_of, watched
from cast_ray.trees.accept import Accepted
from cast_ray.trees.merge import chain_of
from cast_ray.trees.pack import pack_chain
from cast_ray.trees.tree import CandidateTree, Origins
from cast_ray.width.host import read_tree
from cast_ray.width.joint import JointWidth
from cast_ray.width.latency import LatencyTable
from cast_ray.width.policy import WidthPolicy
from cast_ray.width.shape import RoundShape, RoundTimes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Reckoning:
    """What every width promised when it was chosen; arrays are [N + 1], widths 0..N of one request.

    expected: R by corrected masses; round_ms: L. rate: the price of time, tokens a ms, None where the policy has none.
    """

    expected: Array
    round_ms: Array
    rate: float | None


@dataclass(frozen=True)
class ExplainedRound:
    """One drafted round of one request.

    root: its token; position: tokens before it. tree: the whole packed tree, on the CPU. width: nodes verified.
    path: nodes that were committed, by index. chain: the drafter's likeliest token at each depth; of a round in which
    it did not run, the likeliest of what was looked up. following: what the target wrote after the root, as far as
    decoding went. reckoning: None where the width was given, not chosen.
    """

    number: int
    root: int
    position: int
    tree: CandidateTree
    width: int
    path: list[int]
    chain: list[int]
    following: list[int]
    times: RoundTimes
    reckoning: Reckoning | None

    @property
    def committed(self) -> list[int]:
        """The tokens that this round committed, the target's own at the end of the path included."""
        return self.following[: len(self.path) + 1]

    @property
    def chain_committed(self) -> list[int]:
        """What verifying the chain alone would have committed."""
        right = 0
        while right < min(len(self.chain), len(self.following)) and self.chain[right] == self.following[right]:
            right += 1
        return self.following[: right + 1]


class _Watch:
    """A policy whose rounds are written down."""

    def __init__(self, policy: WidthPolicy, latency: LatencyTable | None) -> None:
        self._policy = policy
        self._latency = latency
        self.name, self.max_nodes, self.branching = policy.name, policy.max_nodes, policy.branching
        self.rounds: list[tuple[CandidateTree, int, list[int], RoundTimes, Reckoning | None]] = []
        self._tree: CandidateTree | None = None
        self._width = 0
        self._path: list[int] = []
        self._reckoning: Reckoning | None = None

    def drafts(self, shape: RoundShape) -> bool:
        return self._policy.drafts(shape)

    def choose(self, tree: CandidateTree, shape: RoundShape) -> Tensor:
        self._reckoning = self._reckon(tree, shape)
        chosen = self._policy.choose(tree, shape)
        self._tree, self._width = tree, int(chosen[0])
        return chosen

    def observe(self, tree: CandidateTree, widths: Tensor, accepted: Accepted, temperatures: Tensor | None) -> None:
        self._policy.observe(tree, widths, accepted, temperatures)
        self._path = [row - 1 for row in accepted.path[0, 1 : int(accepted.lengths[0])].tolist()]

    def timed(self, times: RoundTimes) -> None:
        self._policy.timed(times)
        if self._tree is not None:
            self.rounds.append((self._tree, self._width, self._path, times, self._reckoning))
        self._tree, self._path = None, []

    def report(self) -> dict[str, object]:
        return self._policy.report()

    def _reckon(self, tree: CandidateTree, shape: RoundShape) -> Reckoning | None:
        read = read_tree(tree, shape.temperatures)
        if isinstance(self._policy, JointWidth):
            masses = self._policy.reliability.calibrate(read)[0]
            cost = self._policy.cost
            ms = (cost.drafted_ms(shape) if shape.drafted else cost.offered_ms(shape))[: len(masses) + 1]
            return Reckoning(_round_lengths(masses), ms, self._policy.gate.outlook(shape).rate)
        if self._latency is None:
            return None
        nodes = np.arange(read.masses.shape[1] + 1)
        ms = self._latency.round_ms(nodes, shape.batch, shape.mean_context, drafting=shape.drafted)
        return Reckoning(_round_lengths(read.masses[0]), ms, None)


def explain_round(engine: Engine, prompt: Prompt, params: SamplingParams, number: int) -> ExplainedRound:
    """Decode `prompt` and take the `number`-th round that had candidates apart, counted from 1.

    Raises ConfigError where there are fewer, and RequestError where the prompt cannot be decoded.
    """
    drafter, looked_up = drafter_of(engine), engine.stats()["lookup"]
    if drafter is None and looked_up is None:
        problem = "gives no candidates: there is nothing to take apart"
        raise ConfigError(describe("drafter", engine.config.drafter, problem, "Give a DFlash folder, or lookup"))
    latency = engine.stats()["latency"]
    watch = _Watch(engine.policy, LatencyTable.from_dict(latency) if latency else None)
    engine.use_policy(watch)
    tokens = engine.render(prompt)
    engine.submit("explained", tokens, params)
    chains: list[list[int]] = []
    starts: list[int] = []
    text = list(tokens)
    with watched(drafter) if drafter is not None else nullcontext(Proposals()) as proposals:
        while engine.has_work:
            events = engine.step()
            scores = proposals.take()
            if len(watch.rounds) > len(chains):
                tree = watch.rounds[-1][0]
                chain = chain_of(tree) if scores is None else pack_chain(scores, scores.logprobs.shape[1])
                chains.append(chain.tokens[0, : int(chain.counts[0])].tolist())
                starts.append(len(text))
            for event in events:
                text.extend(event.token_ids)
    if not 1 <= number <= len(watch.rounds):
        problem = f"the request had candidates in {len(watch.rounds)} rounds"
        remedy = "Choose one of them, raise --max-tokens, or set --width fixed:15 to draft in every round"
        raise ConfigError(describe("round", number, problem, remedy))
    tree, width, path, times, reckoning = watch.rounds[number - 1]
    start = starts[number - 1]
    return ExplainedRound(
        number=number,
        root=text[start - 1],
        position=start - 1,
        tree=_on_cpu(tree),
        width=width,
        path=path,
        chain=chains[number - 1],
        following=text[start:],
        times=times,
        reckoning=reckoning,
    )


def _round_lengths(masses: Array) -> Array:
    return 1.0 + np.concatenate([[0.0], np.cumsum(masses)])


def _on_cpu(tree: CandidateTree) -> CandidateTree:
    origins = tree.origins
    return CandidateTree(
        tree.tokens.cpu(),
        tree.parents.cpu(),
        tree.depths.cpu(),
        tree.masses.cpu(),
        tree.counts.cpu(),
        max_depth=tree.max_depth,
        origins=None if origins is None else Origins(origins.sources.cpu(), origins.drafter_masses.cpu()),
    )
