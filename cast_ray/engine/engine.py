"""The engine of one device: requests in, rounds, completions out. Synchronous; `async_engine` gives it a thread."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence as List
from typing import Any

import torch

from cast_ray.config import EngineConfig
from cast_ray.drafters.base import Drafter
from cast_ray.drafters.lookup import Output
from cast_ray.engine.books import Books, Deliver, Event
from cast_ray.engine.ending import take
from cast_ray.engine.health import DrafterHealth
from cast_ray.engine.intake import Intake
from cast_ray.engine.prompts import pair_params
from cast_ray.engine.report import report
from cast_ray.engine.round import RoundRunner
from cast_ray.engine.samples import Samples
from cast_ray.engine.scheduler import Scheduler
from cast_ray.engine.sequence import Ending, Sequence
from cast_ray.engine.setup import build
from cast_ray.engine.totals import Totals
from cast_ray.errors import ConfigError, QueueFullError, RequestError, describe
from cast_ray.models.pages import PagePool
from cast_ray.request import Completion, Prompt, SamplingParams, scope_of
from cast_ray.width.policy import WidthPolicy

# Of a step's packed tokens, the share that prompts may always have, however many requests decode.
PROMPT_SHARE = 0.25


class Engine:
    """Decodes with one target on one device.

    `EngineConfig()` gives the embedded target and drafter. Construction loads the models and, where the width policy
    needs it, measures the device or loads its saved profile: seconds, not milliseconds.

        engine = Engine(EngineConfig(dtype="float32"))
        outs = engine.generate(["The capital of France is"], SamplingParams(max_tokens=16))
        outs[0].text, outs[0].stats.mean_round_length
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        parts = build(self.config)
        self._parts = parts
        self.tokenizer = parts.loaded.tokenizer
        self.max_context = parts.max_context
        self.device = parts.device
        self._scheduler = Scheduler(
            PagePool(parts.num_pages),
            self.config.page_size,
            self.config.max_batch_size,
            parts.max_context,
            parts.scratch,
            parts.device,
            most_scratch=parts.tree_places,
            share_prefixes=self.config.prefix_cache and parts.target.states is None,
        )
        watched = self.config.watch_drafter and parts.drafter is not None
        self.health = DrafterHealth(parts.drafter_name, parts.record) if watched else None
        self.use_policy(parts.policy, health=self.health)
        self._intake = Intake(self.config, parts, self._scheduler)
        self._last_width = 0
        self.totals = Totals()
        self._books = Books(self.tokenizer, self.totals)
        # Where launching is computing, there is nothing to do meanwhile, and waiting would only delay what is told.
        self._overlaps = parts.device.type != "cpu" or parts.target.graphs is not None

    def generate(
        self, prompts: List[Prompt], sampling_params: SamplingParams | List[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt, in the order given.

        prompts: strings (raw text), chats (lists of messages, through the model's chat template) or lists of token ids.
        sampling_params: one for all, or one for each. Raises RequestError, before any work, naming the bad prompt.
        """
        chosen = pair_params(prompts, sampling_params)
        rendered = []
        for number, prompt in enumerate(prompts):
            try:
                rendered.append(self.render(prompt))
                self._intake.check(rendered[-1], chosen[number])
            except RequestError as error:
                raise RequestError(f"prompts[{number}]: {error}") from None
        ids = [f"generate-{secrets.token_hex(4)}-{number}" for number in range(len(prompts))]
        # Not all at once: there may be more than the queue takes.
        to_come = deque(zip(ids, rendered, chosen, strict=True))
        done: dict[str, Completion] = {}

        def collect(events: list[Event]) -> None:
            done.update({e.request_id: e.completion for e in events if e.completion is not None})

        try:
            while len(done) < len(ids):
                while to_come and not self._queue_is_full:
                    # Whoever calls is one and the same: all that it had completed may be looked up in.
                    self.submit(*to_come.popleft(), lookup_scope="generate")
                self.advance(collect)
        finally:
            # Interrupted: the next call must not find these running.
            for request_id in ids:
                if request_id not in done:
                    self.abort(request_id)
            self.flush()
        return [done[request_id] for request_id in ids]

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; RequestError when it is empty or of no known kind."""
        return self._intake.render(prompt)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
        traced: bool = False,
        lookup_scope: str | None = None,
    ) -> None:
        """Queue a request. RequestError when it can never run, QueueFullError when too many wait already.

        priority: lower numbers go first, then who came first. stream: its events carry text. traced: and each
        the round's tree. lookup_scope: name of those whose finished outputs may suggest candidates to each
        other, and to nobody else; None shares nothing. It changes speed, never output.
        """
        params = params or SamplingParams()
        in_use = self._scheduler.find(request_id) is not None or request_id in self._books.samples
        if in_use or self._books.holds(request_id):
            raise RequestError(describe("request_id", request_id, "is in use", "Give each request its own"))
        if stream and params.n > 1:
            raise RequestError(describe("n", params.n, "cannot be streamed", "Send a request for each sample"))
        if self._queue_is_full:
            problem = f"{len(self._scheduler.waiting)} requests wait already"
            remedy = "Send it again when some are done, add engines, or raise max_waiting"
            raise QueueFullError(describe("max_waiting", self.config.max_waiting, problem, remedy))
        tokens = self.render(prompt)
        seed = params.seed if params.seed is not None else secrets.randbits(63) if params.temperature else 0
        samples = Samples(request_id, params.n)
        sequences = self._intake.sequences(samples, tokens, params, seed, stream)
        if params.n > 1:
            self._books.samples[request_id] = samples
        scope = scope_of(lookup_scope, prompt)
        for sequence in sequences:
            sequence.priority, sequence.traced, sequence.lookup_scope = priority, traced, scope
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> Completion | None:
        """End a request where it stands; None when there is none of that name."""
        self._books.work_off()
        samples = self._books.samples.get(request_id)
        ids = [request_id] if samples is None else [samples.sequence_id(i) for i in range(samples.count)]
        completion = None
        for sequence_id in ids:
            sequence = self._scheduler.find(sequence_id)
            if sequence is not None:
                self._scheduler.finish(sequence)
                completion = self._books.finish(sequence, Ending("abort"))
        return completion

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or is still to be told of its end."""
        return bool(self._scheduler.running or self._scheduler.waiting) or self._books.pending

    def step(self) -> list[Event]:
        """One round for every decoding request, with prompt chunks of others in the same forward."""
        events: list[Event] = []
        self.advance(events.extend)
        return events + self.flush()

    def flush(self) -> list[Event]:
        """What `advance` has not delivered yet."""
        events: list[Event] = []
        self._books.tell(events.extend, hidden=False)
        return events

    @torch.inference_mode()
    def advance(self, deliver: Deliver) -> None:
        """As `step`, for who goes on stepping: on a device, what a round brought is worked off and delivered while the
        next is computed, or at once where there is no next."""
        began = time.perf_counter()
        scheduler, config = self._scheduler, self.config
        # Trees take as many tokens as they need; prompts get what the last round's width would leave of a step.
        decoding = sum(s.decoding for s in scheduler.running) * (self._last_width + 1)
        budget = max(config.max_step_tokens - decoding, int(config.max_step_tokens * PROMPT_SHARE))
        plan = scheduler.plan(budget)
        self._forget_pages()
        if not plan.decoding and not plan.chunks:
            self._books.tell(deliver, hidden=False)
            return
        running = time.perf_counter()
        outcome = self._rounds.run(plan, scheduler.tables, _keep, lambda: self._books.tell(deliver, hidden=True))
        ran = time.perf_counter()
        scheduler.settle(plan)
        for sequence in plan.decoding:
            if sequence.ending is not None:
                scheduler.finish(sequence)
        if outcome.widths:
            self._last_width = max(outcome.widths)
        self._books.note(plan, outcome)
        self.totals.host["schedule"] += (running - began + time.perf_counter() - ran) * 1000
        if not (self._overlaps and (scheduler.running or scheduler.waiting)):
            self._books.tell(deliver, hidden=False)

    def stats(self) -> dict[str, Any]:
        """Totals, the width policy's report and the latency curve, as plain values."""
        self._books.work_off()
        return report(self._parts, self.totals, self._scheduler, self.policy, self.health)

    def exchange_outputs(self, others: List[Output]) -> list[Output]:
        """For lookup: take in outputs that other engines finished, and give out those finished here since the last
        call; none where nothing is looked up. Those with tokens that this target does not know are left out."""
        if self._parts.lookup is None:
            return []
        size = self._parts.target.vocab_size
        known = [output for output in others if max((*output[1], *output[2]), default=0) < size]
        return self._parts.lookup.exchange(known)

    def use_policy(
        self, policy: WidthPolicy, drafter: Drafter | None = None, health: DrafterHealth | None = None
    ) -> None:
        """Choose widths by `policy` from the next round on, for measurements. Its trees must fit `max_nodes`.

        drafter: one to use instead of the engine's own. health: None lets a drafter that brings nothing go on.
        """
        parts = self._parts
        if policy.branching and policy.max_nodes and parts.target.states is not None:
            problem = f"asks for trees, and target {parts.loaded.name!r} has a recurrent state, which cannot branch"
            raise ConfigError(describe("width", policy.name, problem, "Use chain or ar"))
        self.policy = policy
        self._rounds = RoundRunner(
            parts.target,
            drafter or parts.drafter,
            policy,
            page_size=self.config.page_size,
            top_k=self.config.candidates_per_depth,
            max_context=parts.max_context,
            max_nodes=self.config.max_nodes,
            health=health,
            lookup=parts.lookup,
        )

    def check_integrity(self) -> None:
        """EngineError when a KV page is lost or owned wrongly."""
        self._scheduler.check_integrity()

    @property
    def _queue_is_full(self) -> bool:
        return len(self._scheduler.waiting) >= self.config.max_waiting

    def _forget_pages(self) -> None:
        """Pages that changed hands since the last step mean something else to the drafter now."""
        dropped = self._scheduler.pool.dropped
        if dropped and self._parts.drafter is not None:
            self._parts.drafter.forget(dropped)
        dropped.clear()


def _keep(sequence: Sequence, tokens: list[int]) -> list[int]:
    """See round.Cut."""
    if not sequence.stats.rounds:
        sequence.stats.time_to_first_token_ms = (time.perf_counter() - sequence.submitted) * 1000
    before = len(sequence.tokens)
    kept = take(sequence, tokens)
    # Of the round's own tokens all but the last are in the cache; what `take` adds of itself never is.
    sequence.cached = before + min(len(kept), len(tokens)) - 1
    return kept
