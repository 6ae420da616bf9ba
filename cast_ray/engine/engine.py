"""The engine of one device: requests in, rounds, completions out. Synchronous; `async_engine` gives it a thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import torch

from cast_ray.calibration.profile import device_name
from cast_ray.config import EngineConfig
from cast_ray.engine.prompts import pair_params, render
from cast_ray.engine.round import RoundRunner
from cast_ray.engine.scheduler import Scheduler, Sequence
from cast_ray.engine.setup import build
from cast_ray.errors import RequestError
from cast_ray.models.kv_cache import PageAllocator
from cast_ray.request import Completion, Prompt, SamplingParams

# Of a step's packed tokens, the share that prompts may always have, however many requests decode.
PROMPT_SHARE = 0.25


@dataclass(frozen=True)
class Event:
    """What a step did for one request: the tokens that it gained, and its completion where it ended."""

    request_id: str
    token_ids: list[int]
    completion: Completion | None = None


@dataclass
class Totals:
    """Sums over an engine's life; times in wall ms. A request-round is one request's part in one round.

    prefill_ms: steps of prompt chunks alone; chunks that rode along with a round are in its verify_ms.
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
    host_ms: float = 0.0
    prefill_ms: float = 0.0
    finish_reasons: dict[str, int] = field(default_factory=dict)


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
            PageAllocator(parts.num_pages),
            self.config.page_size,
            self.config.max_batch_size,
            parts.max_context,
            parts.scratch,
            parts.device,
        )
        self._rounds = RoundRunner(
            parts.target,
            parts.drafter,
            parts.policy,
            page_size=self.config.page_size,
            top_k=self.config.candidates_per_depth,
            max_context=parts.max_context,
        )
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
            except RequestError as error:
                raise RequestError(f"prompts[{number}]: {error}") from None
        ids = [f"generate-{secrets.token_hex(4)}-{number}" for number in range(len(prompts))]
        for request_id, tokens, params in zip(ids, rendered, chosen, strict=True):
            self.submit(request_id, tokens, params)
        done: dict[str, Completion] = {}
        try:
            while len(done) < len(ids):
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

    def submit(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request; RequestError when it can never run."""
        params = params or SamplingParams()
        tokens = self.render(prompt)
        self._check_length(tokens, params)
        seed = params.seed if params.seed is not None else secrets.randbits(63) if params.temperature else 0
        stop = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self._parts.loaded.eos_token_ids)
        end = min(len(tokens) + params.max_tokens, self.max_context)
        self._scheduler.add(Sequence(request_id, tokens, len(tokens), params, seed, stop, end))

    def abort(self, request_id: str) -> Completion | None:
        """End a request where it stands; None when there is none of that name."""
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if sequence.request_id == request_id:
                return self._finish(sequence, "abort")
        return None

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round for every decoding request, with prompt chunks of others in the same forward."""
        scheduler, config = self._scheduler, self.config
        # Trees take as many tokens as they need; prompts get what the last round's width would leave of a step.
        decoding = sum(s.decoding for s in scheduler.running) * (self._last_width + 1)
        budget = max(config.max_step_tokens - decoding, int(config.max_step_tokens * PROMPT_SHARE))
        plan = scheduler.plan(budget)
        if not plan.decoding and not plan.chunks:
            return []
        outcome = self._rounds.run(plan, scheduler.tables, self._keep)
        self._last_width = max(outcome.widths, default=self._last_width)
        totals = self.totals
        totals.steps += 1
        if not plan.decoding:
            totals.prefill_ms += outcome.verify_ms
        else:
            totals.draft_ms += outcome.draft_ms
            totals.verify_ms += outcome.verify_ms
        totals.host_ms += outcome.host_ms
        for sequence, kept, width in zip(plan.decoding, outcome.committed, outcome.widths, strict=True):
            stats = sequence.stats
            stats.rounds += 1
            stats.nodes_verified += width
            stats.tokens_committed += len(kept)
            stats.draft_rounds += outcome.drafted
            totals.request_rounds += 1
            totals.nodes_verified += width
            totals.tokens_committed += len(kept)
        finishing = time.perf_counter()
        events = [self._event(s, kept) for s, kept in zip(plan.decoding, outcome.committed, strict=True)]
        totals.host_ms += (time.perf_counter() - finishing) * 1000
        return events

    def stats(self) -> dict[str, Any]:
        """Totals, the width policy's report and the latency curve, as plain values."""
        parts, totals = self._parts, self.totals
        rounds = totals.request_rounds
        return {
            "target": parts.loaded.name,
            "drafter": parts.drafter_name,
            "device": {
                "name": device_name(parts.device),
                "dtype": str(parts.target.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
            },
            "requests_finished": totals.requests_finished,
            "finish_reasons": dict(totals.finish_reasons),
            "input_tokens": totals.input_tokens,
            "tokens_generated": totals.tokens_generated,
            "steps": totals.steps,
            "rounds": rounds,
            "mean_round_length": totals.tokens_committed / rounds if rounds else 0.0,
            "nodes_verified": totals.nodes_verified,
            "mean_nodes": totals.nodes_verified / rounds if rounds else 0.0,
            "draft_ms": totals.draft_ms,
            "verify_ms": totals.verify_ms,
            "host_ms": totals.host_ms,
            "prefill_ms": totals.prefill_ms,
            "width": parts.policy.report(),
            "latency": parts.latency.to_dict() if parts.latency else None,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "kv_pages_free": self._scheduler.allocator.num_free,
            "kv_pages": parts.num_pages,
        }

    def check_integrity(self) -> None:
        """EngineError when a KV page is lost or owned twice."""
        self._scheduler.check_integrity()

    def _keep(self, sequence: Sequence, tokens: list[int]) -> tuple[list[int], bool]:
        """Cut a round's tokens at the request's end and append them. See round.Cut."""
        kept = tokens[: sequence.max_length - len(sequence.tokens)]
        ends = len(sequence.tokens) + len(kept) == sequence.max_length
        for place, token in enumerate(kept):
            if token in sequence.stop_tokens:
                kept, ends = kept[: place + 1], True
                break
        if not sequence.stats.rounds:
            sequence.stats.time_to_first_token_ms = (time.perf_counter() - sequence.submitted) * 1000
        sequence.tokens.extend(kept)
        sequence.cached = len(sequence.tokens) - 1
        return kept, ends

    def _event(self, sequence: Sequence, kept: list[int]) -> Event:
        stopped = sequence.tokens[-1] in sequence.stop_tokens
        if stopped or len(sequence.tokens) == sequence.max_length:
            return Event(sequence.request_id, kept, self._finish(sequence, "stop" if stopped else "length"))
        return Event(sequence.request_id, kept)

    def _finish(self, sequence: Sequence, reason: str) -> Completion:
        pages = self._scheduler.finish(sequence)
        if self._parts.drafter is not None and pages:
            self._parts.drafter.forget(pages)
        output = sequence.tokens[sequence.num_prompt :]
        shown = output[:-1] if reason == "stop" else output
        sequence.stats.total_ms = (time.perf_counter() - sequence.submitted) * 1000
        totals = self.totals
        totals.requests_finished += 1
        totals.input_tokens += sequence.num_prompt
        totals.tokens_generated += len(output)
        totals.finish_reasons[reason] = totals.finish_reasons.get(reason, 0) + 1
        return Completion(
            request_id=sequence.request_id,
            text=self.tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            token_ids=output,
            finish_reason=reason,
            num_input_tokens=sequence.num_prompt,
            seed=sequence.seed if sequence.params.temperature else sequence.params.seed,
            stats=sequence.stats,
        )

    def _check_length(self, tokens: list[int], params: SamplingParams) -> None:
        if len(tokens) >= self.max_context:
            problem = f"{len(tokens)} tokens leave no room for an answer in a context of {self.max_context}"
            raise RequestError(f"prompt: {problem}. Shorten the prompt, or use a target with a longer context.")
        end = min(len(tokens) + params.max_tokens, self.max_context)
        pages, pool = self._scheduler.pages_for(end), self._parts.num_pages
        if pages > pool:
            page = self.config.page_size
            problem = f"{len(tokens)} prompt tokens and max_tokens={params.max_tokens} need {pages * page} KV places"
            raise RequestError(
                f"prompt: {problem}, the pool has {pool * page}. Lower max_tokens or raise kv_cache_tokens."
            )
