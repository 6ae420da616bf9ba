"""How one request emits, while it runs: its rules, its grammar, and what is to be reported of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cast_ray.errors import RequestError, describe
from cast_ray.request import SamplingParams, TokenLogprob
from cast_ray.sampling.check import check_params
from cast_ray.sampling.choice import LabelGrammar, LabelTree
from cast_ray.sampling.grammar import Grammar, GrammarCompiler
from cast_ray.sampling.rules import Rules, make_rules


class Emitting:
    """State of a request that asks for more than argmax or a plain sample. It belongs to one request alone.

    grammar: None without one. logprobs, prompt_logprobs: what has been found so far, None where nobody asked.
    choice_probabilities: None until they are known.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int,
        stops: Sequence[int],
        bad_words: tuple[tuple[int, ...], ...],
        grammar: Grammar | None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        self.choice_probabilities: dict[str, float] | None = None
        self._num_prompt = num_prompt
        self._stops = tuple(stops)
        self._bad_words = bad_words
        self._rules: Rules | None = None
        self._ready = False

    @property
    def label_tree(self) -> LabelTree | None:
        """The labels whose probabilities are asked for and not known yet."""
        if not self.params.choice_probabilities or self.choice_probabilities is not None:
            return None
        assert isinstance(self.grammar, LabelGrammar)
        return self.grammar.tree

    @property
    def missing_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are still to be scored: then none of them may come from a cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self._num_prompt

    @property
    def finished(self) -> bool:
        """Whether the grammar leaves nothing more to say."""
        return self.grammar is not None and self.grammar.finished

    def certain_end(self) -> list[int]:
        """Tokens up to the output's end that the target need not be asked for: masked, it could emit no others.

        Where their log probabilities are wanted it is asked all the same.
        """
        return [] if self.grammar is None or self.logprobs is not None else self.grammar.certain_end()

    def rules(self, tokens: Sequence[int], vocab_size: int, device: torch.device) -> Rules | None:
        """The request's rules, None when it has none. Its tensors are made when it decodes first.

        tokens: all that it has, prompt and output.
        """
        if not self._ready:
            self._ready = True
            prompt, output = tokens[: self._num_prompt], tokens[self._num_prompt :]
            words, stops = self._bad_words, self._stops
            self._rules = make_rules(
                self.params, prompt, bad_words=words, stops=stops, vocab_size=vocab_size, device=device
            )
            if self._rules is not None and self._rules.counts is not None:
                self._rules.counts.add(output)
        return self._rules

    def commit(self, tokens: Sequence[int]) -> int:
        """Take in tokens that a round committed; how many of them belong to the output."""
        kept = len(tokens) if self.grammar is None else self.grammar.advance(tokens)
        if self._rules is not None and self._rules.counts is not None:
            self._rules.counts.add(tokens[:kept])
        return kept


class EmittingFactory:
    """Makes the state of requests to one target.

    most_nodes: candidates that one round can verify of a request. branches: whether they may be a tree.
    """

    def __init__(
        self, compiler: GrammarCompiler, tokenizer: object, vocab_size: int, most_nodes: int, branches: bool = True
    ) -> None:
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._most_nodes = most_nodes
        self._branches = branches

    def make(self, params: SamplingParams, num_prompt: int, stops: Sequence[int]) -> Emitting | None:
        """The state of a request; None for one that asks for nothing special. RequestError when it can never run.

        stops: tokens that end it.
        """
        bad_words = check_params(params, self._vocab_size, self._tokenizer)
        grammar = self._compiler.compile(params)
        emitting = Emitting(params, num_prompt, stops, bad_words, grammar)
        tree = emitting.label_tree
        if tree is not None and not self._branches:
            problem = "needs a tree of the labels, and this target has a recurrent state, which cannot branch"
            raise RequestError(describe("choice_probabilities", True, problem, "Use choice alone, or logprobs"))
        if tree is not None and len(tree) > self._most_nodes:
            problem = f"the labels are {len(tree)} candidates and a round verifies {self._most_nodes}"
            remedy = f"Shorten the labels, or set the engine's max_nodes to {len(tree)}"
            raise RequestError(describe("choice_probabilities", True, problem, remedy))
        return emitting if self._asks(params, bad_words) else None

    def _asks(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> bool:
        reports = params.logprobs is not None or params.prompt_logprobs is not None
        penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        bans = params.logit_bias or bad_words or params.allowed_token_ids or params.min_tokens
        return bool(reports or penalties or bans or params.filtered or params.structured)
