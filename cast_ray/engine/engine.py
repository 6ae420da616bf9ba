"""The engine of one device: requests in, rounds, completions out. Synchronous; `async_engine` gives it a thread."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import torch

from cast_ray.config import EngineConfig
from cast_ray.drafters.base import Drafter
from cast_ray.drafters.lookup import Output
from cast_ray.engine.ending import take
from cast_ray.engine.health import DrafterHealth
from cast_ray.engine.output import complete, echo, fresh_logprobs, output_text
from cast_ray.engine.prompts import pair_params, render
from cast_ray.engine.report import report
from cast_ray.engine.round import RoundRunner
from cast_ray.engine.samples import Samples, sample_params
from cast_ray.engine.scheduler import Scheduler
from cast_ray.engine.sequence import Ending, Sequence
from cast_ray.engine.setup import build
from cast_ray.engine.totals import Totals
from cast_ray.engine.trace import RoundTrace
from cast_ray.errors import ConfigError, QueueFullError, RequestError, describe
from cast_ray.models.pages import PagePool
from cast_ray.request import Completion, Prompt, SamplingParams, TokenLogprob, scope_of
from cast_ray.sampling.emitting import EmittingFactory
from cast_ray.sampling.grammar import GrammarCompiler
from cast_ray.width.policy import WidthPolicy

# Of a step's packed tokens, the share that prompts may always have, however many requests decode.
PROMPT_SHARE = 0.25


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
        self.health = DrafterHealth(parts.drafter_name) if watched else None
        self.use_policy(parts.policy, health=self.health)
        vocab_size, ends = parts.target.vocab_size, parts.loaded.eos_token_ids
        grammars = GrammarCompiler(self.tokenizer, vocab_size, ends)
        branches = parts.target.states is None
        self._emitting = EmittingFactory(grammars, self.tokenizer, vocab_size, self.config.max_nodes, branches)
        self._samples: dict[str, Samples] = {}  # of requests with n > 1, until the last is done
        self._last_width = 0
        self.totals = Totals()

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
                self._check_length(rendered[-1], chosen[number])
                self._emitting.make(chosen[number], len(rendered[-1]), ())
            except RequestError as error:
                raise RequestError(f"prompts[{number}]: {error}") from None
        ids = [f"generate-{secrets.token_hex(4)}-{number}" for number in range(len(prompts))]
        # Not all at once: there may be more than the queue takes.
        to_come = deque(zip(ids, rendered, chosen, strict=True))
        done: dict[str, Completion] = {}
        try:
            while len(done) < len(ids):
                while to_come and not self._queue_is_full:
                    # Whoever calls is one and the same: all that it had completed may be looked up in.
                    self.submit(*to_come.popleft(), lookup_scope="generate")
                for event in self.step():
                    if event.completion is not None:
                        done[event.request_id] = event.completion
        finally:
            # Interrupted: the next call must not find these running.
            for request_id in ids:
                if request_id not in done:
                    self.abort(request_id)
        return [done[request_id] for request_id in ids]

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; RequestError when it is empty or of no known kind."""
        return render(prompt, self._parts.loaded, self._parts.target.vocab_size)

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
        if self._scheduler.find(request_id) is not None or request_id in self._samples:
            raise RequestError(describe("request_id", request_id, "is in use", "Give each request its own"))
        if stream and params.n > 1:
            raise RequestError(describe("n", params.n, "cannot be streamed", "Send a request for each sample"))
        if self._queue_is_full:
            problem = f"{len(self._scheduler.waiting)} requests wait already"
            remedy = "Send it again when some are done, add engines, or raise max_waiting"
            raise QueueFullError(describe("max_waiting", self.config.max_waiting, problem, remedy))
        tokens = self.render(prompt)
        self._check_length(tokens, params)
        seed = params.seed if params.seed is not None else secrets.randbits(63) if params.temperature else 0
        samples = Samples(request_id, params.n)
        sequences = [
            self._sequence(samples.sequence_id(index), list(tokens), own, own_seed, stream)
            for index, (own, own_seed) in enumerate(sample_params(params, seed))
        ]
        if params.n > 1:
            self._samples[request_id] = samples
        scope = scope_of(lookup_scope, prompt)
        for index, sequence in enumerate(sequences):
            sequence.priority, sequence.index, sequence.traced = priority, index, traced
            sequence.lookup_scope = scope
            sequence.samples = samples if params.n > 1 else None
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> Completion | None:
        """End a request where it stands; None when there is none of that name."""
        samples = self._samples.get(request_id)
        ids = [request_id] if samples is None else [samples.sequence_id(i) for i in range(samples.count)]
        completion = None
        for sequence_id in ids:
            sequence = self._scheduler.find(sequence_id)
            if sequence is not None:
                completion = self._finish(sequence, Ending("abort"))
        return completion

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round for every decoding request, with prompt chunks of others in the same forward."""
        began = time.perf_counter()
        scheduler, config = self._scheduler, self.config
        # Trees take as many tokens as they need; prompts get what the last round's width would leave of a step.
        decoding = sum(s.decoding for s in scheduler.running) * (self._last_width + 1)
        budget = max(config.max_step_tokens - decoding, int(config.max_step_tokens * PROMPT_SHARE))
        plan = scheduler.plan(budget)
        self._forget_pages()
        if not plan.decoding and not plan.chunks:
            return []
        running = time.perf_counter()
        outcome = self._rounds.run(plan, scheduler.tables, _keep)
        ran = time.perf_counter()
        scheduler.settle(plan)
        self.totals.count(plan, outcome)
        if outcome.widths:
            self._last_width = max(outcome.widths)
        settled = time.perf_counter()
        events = [self._event(s, kept) for s, kept in zip(plan.decoding, outcome.committed, strict=True)]
        self.totals.host["schedule"] += (running - began + settled - ran) * 1000
        self.totals.host["detokenise"] += (time.perf_counter() - settled) * 1000
        return events

    def stats(self) -> dict[str, Any]:
        """Totals, the width policy's report and the latency curve, as plain values."""
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

    def _sequence(
        self, request_id: str, tokens: list[int], params: SamplingParams, seed: int, stream: bool
    ) -> Sequence:
        stop = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self._parts.loaded.eos_token_ids)
        end = min(len(tokens) + params.max_tokens, self.max_context)
        emitting = self._emitting.make(params, len(tokens), sorted(stop))
        sequence = Sequence(request_id, tokens, len(tokens), params, seed, stop, end, emitting=emitting)
        sequence.scratch = self._scratch(params)
        if stream or params.stop:
            sequence.text = output_text(self.tokenizer, params)
        if stream:
            sequence.streams, sequence.fresh = True, echo(self.tokenizer, sequence)
        return sequence

    def _scratch(self, params: SamplingParams) -> int:
        """Places that the request itself asks for: what a grammar foresees is verified as a tree at every width."""
        return self._parts.tree_places if params.structured else 0

    def _event(self, sequence: Sequence, kept: list[int]) -> Event:
        completion = self._finish(sequence, sequence.ending) if sequence.ending is not None else None
        text, sequence.fresh = sequence.fresh if sequence.streams else "", ""
        trace, sequence.trace = sequence.trace, None
        logprobs = fresh_logprobs(sequence, len(kept)) if sequence.streams else None
        return Event(sequence.shown_id, kept, completion, text, sequence.index, trace, logprobs)

    def _finish(self, sequence: Sequence, ending: Ending) -> Completion | None:
        """Take it out: the request's completion, None where other samples of it still run."""
        self._scheduler.finish(sequence)
        completion = complete(self.tokenizer, sequence, ending)
        totals = self.totals
        totals.requests_finished += 1
        totals.input_tokens += sequence.num_prompt
        totals.tokens_generated += len(completion.token_ids)
        totals.finish_reasons[ending.reason] = totals.finish_reasons.get(ending.reason, 0) + 1
        if sequence.samples is None:
            return completion
        whole = sequence.samples.add(sequence.index, completion)
        if whole is not None:
            del self._samples[whole.request_id]
        return whole

    def _check_length(self, tokens: list[int], params: SamplingParams) -> None:
        if len(tokens) >= self.max_context:
            problem = f"{len(tokens)} tokens leave no room for an answer in a context of {self.max_context}"
            raise RequestError(f"prompt: {problem}. Shorten the prompt, or use a target with a longer context.")
        end = min(len(tokens) + params.max_tokens, self.max_context)
        pages, pool = self._scheduler.pages_for(end, self._scratch(params)), self._parts.num_pages
        if pages > pool:
            page = self.config.page_size
            problem = f"{len(tokens)} prompt tokens and max_tokens={params.max_tokens} need {pages * page} KV places"
            raise RequestError(
                f"prompt: {problem}, the pool has {pool * page}. Lower max_tokens or raise kv_cache_tokens."
            )


def _keep(sequence: Sequence, tokens: list[int]) -> list[int]:
    """See round.Cut."""
    if not sequence.stats.rounds:
        sequence.stats.time_to_first_token_ms = (time.perf_counter() - sequence.submitted) * 1000
    before = len(sequence.tokens)
    kept = take(sequence, tokens)
    # Of the round's own tokens all but the last are in the cache; what `take` adds of itself never is.
    sequence.cached = before + min(len(kept), len(tokens)) - 1
    return kept
