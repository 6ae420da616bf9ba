"""From what is asked to sequences: prompts rendered, lengths held against the context and the pool, emission set up."""

from __future__ import annotations

from cast_ray.config import EngineConfig
from cast_ray.engine.output import echo, output_text
from cast_ray.engine.prompts import render
from cast_ray.engine.samples import Samples, sample_params
from cast_ray.engine.scheduler import Scheduler
from cast_ray.engine.sequence import Sequence
from cast_ray.engine.setup import Parts
from cast_ray.errors import RequestError
from cast_ray.request import Prompt, SamplingParams
from cast_ray.sampling.emitting import EmittingFactory
from cast_ray.sampling.grammar import GrammarCompiler


class Intake:
    """What an engine takes in. It queues nothing; RequestError names what can never run."""

    def __init__(self, config: EngineConfig, parts: Parts, scheduler: Scheduler) -> None:
        self._page_size = config.page_size
        self._parts = parts
        self._scheduler = scheduler
        self._tokenizer = parts.loaded.tokenizer
        vocab_size = parts.target.vocab_size
        grammars = GrammarCompiler(self._tokenizer, vocab_size, parts.loaded.eos_token_ids)
        branches = parts.target.states is None
        self._emitting = EmittingFactory(grammars, self._tokenizer, vocab_size, config.max_nodes, branches)

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; RequestError when it is empty or of no known kind."""
        return render(prompt, self._parts.loaded, self._parts.target.vocab_size)

    def check(self, tokens: list[int], params: SamplingParams) -> None:
        """RequestError for a prompt that leaves no room for its answer, or parameters that nothing satisfies."""
        self._check_length(tokens, params)
        self._emitting.make(params, len(tokens), ())

    def sequences(
        self, samples: Samples, tokens: list[int], params: SamplingParams, seed: int, stream: bool
    ) -> list[Sequence]:
        """The sequences of a request, one for each of its samples."""
        self._check_length(tokens, params)
        made = []
        for index, (own, own_seed) in enumerate(sample_params(params, seed)):
            sequence = self._sequence(samples.sequence_id(index), list(tokens), own, own_seed, stream)
            sequence.index = index
            sequence.samples = samples if params.n > 1 else None
            made.append(sequence)
        return made

    def _sequence(
        self, request_id: str, tokens: list[int], params: SamplingParams, seed: int, stream: bool
    ) -> Sequence:
        stop = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self._parts.loaded.eos_token_ids)
        end = min(len(tokens) + params.max_tokens, self._parts.max_context)
        emitting = self._emitting.make(params, len(tokens), sorted(stop))
        sequence = Sequence(request_id, tokens, len(tokens), params, seed, stop, end, emitting=emitting)
        sequence.scratch = self._scratch(params)
        if stream or params.stop:
            sequence.text = output_text(self._tokenizer, params)
        if stream:
            sequence.streams, sequence.fresh = True, echo(self._tokenizer, sequence)
        return sequence

    def _scratch(self, params: SamplingParams) -> int:
        """Places that the request itself asks for: what a grammar foresees is verified as a tree at every width."""
        return self._parts.tree_places if params.structured else 0

    def _check_length(self, tokens: list[int], params: SamplingParams) -> None:
        most = self._parts.max_context
        if len(tokens) >= most:
            problem = f"{len(tokens)} tokens leave no room for an answer in a context of {most}"
            raise RequestError(f"prompt: {problem}. Shorten the prompt, or use a target with a longer context.")
        end = min(len(tokens) + params.max_tokens, most)
        pages, pool = self._scheduler.pages_for(end, self._scratch(params)), self._parts.num_pages
        if pages > pool:
            page = self._page_size
            problem = f"{len(tokens)} prompt tokens and max_tokens={params.max_tokens} need {pages * page} KV places"
            raise RequestError(
                f"prompt: {problem}, the pool has {pool * page}. Lower max_tokens or raise kv_cache_tokens."
            )
