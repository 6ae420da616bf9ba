"""What a step brought, told to its requests: totals, text, events and completions. None of it decides what comes next.

So it may wait until the device has the next step's work, and is then done while that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cast_ray.engine.ending import show
from cast_ray.engine.output import complete, fresh_logprobs
from cast_ray.engine.round import Outcome
from cast_ray.engine.samples import Samples
from cast_ray.engine.scheduler import Plan
from cast_ray.engine.sequence import Ending, Sequence
from cast_ray.engine.totals import Totals
from cast_ray.engine.trace import RoundTrace
from cast_ray.request import Completion, TokenLogprob


@dataclass(frozen=True)
class Event:
    """What a step did for one request: the tokens that it gained, and its completion where it ended.

    text: what a streaming request may show more than before; always empty for others. index: of its `n` samples; the
    completion comes with the event of the last of them. trace: what the round did, for a request that asks to see it.
    logprobs: of the tokens, for a streaming request that asks for them.
    """

    request_id: str
    token_ids: list[int]
    completion: Completion | None = None
    text: str = ""
    index: int = 0
    trace: RoundTrace | None = None
    logprobs: list[TokenLogprob] | None = None


# Who takes the events of a step.
Deliver = Callable[[list[Event]], None]


class Books:
    """See the module. samples: of requests with n > 1, by their id, until the last is done."""

    def __init__(self, tokenizer: Any, totals: Totals) -> None:
        self.samples: dict[str, Samples] = {}
        self._tokenizer = tokenizer
        self._totals = totals
        self._open: tuple[Plan, Outcome] | None = None
        self._events: list[Event] = []

    @property
    def pending(self) -> bool:
        """Whether a step is still to be told of."""
        return self._open is not None or bool(self._events)

    def holds(self, request_id: str) -> bool:
        """Whether something is still to be told of a request of this id."""
        waiting = self._open[0].decoding if self._open is not None else []
        return any(s.shown_id == request_id for s in waiting) or any(e.request_id == request_id for e in self._events)

    def note(self, plan: Plan, outcome: Outcome) -> None:
        """A step that has been done. The one before has been worked off."""
        self._open = plan, outcome

    def work_off(self) -> None:
        """Make events of the step that was noted, and count it."""
        if self._open is None:
            return
        (plan, outcome), self._open = self._open, None
        self._totals.count(plan, outcome)
        outcome.tell()
        self._events += [self._event(s, kept) for s, kept in zip(plan.decoding, outcome.committed, strict=True)]

    def tell(self, deliver: Deliver, *, hidden: bool) -> None:
        """Work off, and hand out all events. hidden: whether the device computes meanwhile."""
        began = time.perf_counter()
        self.work_off()
        events, self._events = self._events, []
        if events:
            deliver(events)
        self._totals.told((time.perf_counter() - began) * 1000, hidden=hidden)

    def finish(self, sequence: Sequence, ending: Ending) -> Completion | None:
        """A request's completion, None where other samples of it still run. The scheduler has let it go."""
        completion = complete(self._tokenizer, sequence, ending)
        totals = self._totals
        totals.requests_finished += 1
        totals.input_tokens += sequence.num_prompt
        totals.tokens_generated += len(completion.token_ids)
        totals.finish_reasons[ending.reason] = totals.finish_reasons.get(ending.reason, 0) + 1
        if sequence.samples is None:
            return completion
        whole = sequence.samples.add(sequence.index, completion)
        if whole is not None:
            del self.samples[whole.request_id]
        return whole

    def _event(self, sequence: Sequence, kept: list[int]) -> Event:
        show(sequence, kept)
        completion = self.finish(sequence, sequence.ending) if sequence.ending is not None else None
        text, sequence.fresh = sequence.fresh if sequence.streams else "", ""
        trace, sequence.trace = sequence.trace, None
        logprobs = fresh_logprobs(sequence, len(kept)) if sequence.streams else None
        return Event(sequence.shown_id, kept, completion, text, sequence.index, trace, logprobs)
