"""What an engine has done since its start, in sums. Counting only; `Engine.stats` gives them names for the outside."""

from __future__ import annotations

from dataclasses import dataclass, field

from cast_ray.engine.round import Outcome
from cast_ray.engine.scheduler import Plan
from cast_ray.engine.tally import SOURCES, count_accepted

# What the host does in a round, in order; the names of the parts of `stats()["host"]`.
HOST_STAGES = ("schedule", "lookup", "pack", "choose", "plan", "accept", "commit", "detokenise")


@dataclass
class Totals:
    """Sums over an engine's life; times in wall ms. A request-round is one request's part in one round.

    target_tokens: tokens that the target computed, of prompts and trees together.
    prefill_ms: steps of prompt chunks alone; chunks that rode along with a round are in its verify_ms.
    accepted: candidates accepted, by source. host: what is neither the target's nor the drafter's forward, by stage.
    hidden_ms: what the host did for a round while a device computed the next, which is in draft_ms or verify_ms.
    """

    requests_finished: int = 0
    input_tokens: int = 0
    tokens_generated: int = 0
    steps: int = 0
    request_rounds: int = 0
    tokens_committed: int = 0
    nodes_verified: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    prefill_ms: float = 0.0
    hidden_ms: float = 0.0
    target_tokens: int = 0
    host: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HOST_STAGES, 0.0))
    finish_reasons: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))

    def told(self, ms: float, *, hidden: bool) -> None:
        """Add the time that telling requests of a round took. hidden: whether a device computed meanwhile."""
        if hidden:
            self.hidden_ms += ms
        else:
            self.host["detokenise"] += ms

    def count(self, plan: Plan, outcome: Outcome) -> None:
        """Add one step, to the sums and to the statistics of its requests."""
        self.steps += 1
        if plan.decoding:
            self.draft_ms += outcome.draft_ms
            self.verify_ms += outcome.verify_ms
        else:
            self.prefill_ms += outcome.verify_ms
        for stage, ms in outcome.host.items():
            self.host[stage] += ms
        self.target_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        for sequence, kept, width in zip(plan.decoding, outcome.committed, outcome.widths, strict=True):
            stats = sequence.stats
            stats.rounds += 1
            stats.nodes_verified += width
            stats.tokens_committed += len(kept)
            stats.draft_rounds += outcome.drafted
            self.request_rounds += 1
            self.nodes_verified += width
            self.tokens_committed += len(kept)
            self.target_tokens += width + 1
        parts = (plan.decoding, outcome.sources, outcome.lengths, outcome.committed)
        for sequence, sources, length, kept in zip(*parts, strict=True):
            own = sequence.stats.accepted_by_source
            for name, count in zip(SOURCES, count_accepted(sources, length, len(kept)), strict=True):
                if count:
                    own[name] = own.get(name, 0) + count
                    self.accepted[name] += count
