"""The arithmetic of routing, and what a process knows of the replicas that it routes to. `routing` is Serve's side.

    predicted finish = (tokens outstanding + tokens to generate + prompt tokens to read x READ_COST) / tokens a second

Prompt tokens that a replica has lately read need not be read again, so a beginning in common draws requests together
exactly as far as it pays.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from cast_ray.serve.wire import CHARACTERS_A_TOKEN, PREFIX_BLOCK, Ask

# Reading a prompt token takes about so much of the time that generating one does.
READ_COST = 0.05
# Tokens that an answer is expected to have before there is one to go by.
FIRST_GUESS = 128.0
# Blocks of prompts that a replica is taken to remember, 256 characters each.
REMEMBERED = 4096
# A replica whose report is older says nothing about the present.
STALE_S = 30.0

# Routers of this process: any object with Serve's `curr_replicas`.
_routers: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass
class Ledger:
    """What one router knows of one replica."""

    report: int = -1
    reported: float = 0.0  # monotonic time of the last report
    others: float = 0.0  # tokens outstanding there that this router did not send
    # Tokens that this router sent, by Serve's id of the request, which its samples share.
    mine: dict[str, list[float]] = field(default_factory=dict)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def update(self, stats: dict[str, Any], now: float) -> None:
        """Take in the replica's report where it is a new one."""
        if stats.get("report", -1) != self.report:
            self.report, self.reported = stats.get("report", -1), now
            self.others = max(0.0, stats.get("outstanding_tokens", 0.0) - self.sent)
        elif now - self.reported > STALE_S:
            self.others = 0.0

    @property
    def sent(self) -> float:
        """Tokens outstanding there that this router sent."""
        return math.fsum(cost for costs in self.mine.values() for cost in costs)

    def send(self, request_id: str, cost: float) -> None:
        """A request went there."""
        self.mine.setdefault(request_id, []).append(cost)

    def complete(self, request_id: str) -> None:
        """A request of that id ended there, whichever of its samples."""
        costs = self.mine.get(request_id)
        if costs:
            costs.pop()
        if not costs:
            self.mine.pop(request_id, None)

    def known(self, hashes: list[int]) -> int:
        """Blocks of a prompt's beginning that went to this replica before."""
        count = 0
        for one in hashes:
            if one not in self.prefixes:
                break
            count += 1
        return count

    def remember(self, hashes: list[int]) -> None:
        """A prompt went there; the oldest are forgotten."""
        for one in hashes:
            self.prefixes[one] = None
            self.prefixes.move_to_end(one)
        while len(self.prefixes) > REMEMBERED:
            self.prefixes.popitem(last=False)


@dataclass(frozen=True)
class Cost:
    """What a request takes, in generated tokens' worth, at a replica that knows `known` blocks of its prompt."""

    output: float
    prompt: float

    @classmethod
    def of(cls, ask: Ask, mean_tokens: float | None) -> Cost:
        """A router does not tokenise: a token is taken to be four characters."""
        return cls(min(ask.params.max_tokens, mean_tokens or FIRST_GUESS), ask.characters / CHARACTERS_A_TOKEN)

    def at(self, known: int) -> float:
        """In tokens."""
        read = known * PREFIX_BLOCK / CHARACTERS_A_TOKEN
        return self.output + READ_COST * max(0.0, self.prompt - read)


def rank(costs: list[float], loads: list[float], rates: list[float | None]) -> list[int]:
    """Indices of replicas, the one that finishes first in front.

    costs: tokens that the request takes at each; loads: tokens outstanding; rates: tokens a second, None where not yet
    measured: such a one is taken to be as fast as the mean of the others.
    """
    known = [rate for rate in rates if rate]
    usual = sum(known) / len(known) if known else 1.0
    finish = [(load + cost) / (rate or usual) for cost, load, rate in zip(costs, loads, rates, strict=True)]
    return sorted(range(len(costs)), key=lambda index: (finish[index], index))


def announce(router: Any) -> None:
    """A router of this process has begun."""
    _routers.add(router)


def reports() -> dict[str, dict[str, Any]]:
    """The last report of every replica that this process's routers know, by the replica's name."""
    found: dict[str, dict[str, Any]] = {}
    for router in list(_routers):
        for replica in list(router.curr_replicas.values()):
            found[replica.replica_id.unique_id] = {"node": replica.node_id, **(replica.routing_stats or {})}
    return dict(sorted(found.items()))
