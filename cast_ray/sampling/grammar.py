"""Outputs of a given form: what a grammar lets come after each node of a tree, and what it makes certain.

Regular expressions and JSON are llguidance's; labels are our own, see `sampling.choice`. A grammar is one request's
state; it moves by what is committed, and looks ahead over a tree without moving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor

from cast_ray.errors import RequestError, describe
from cast_ray.request import SamplingParams
from cast_ray.sampling.choice import LabelGrammar, LabelTree
from cast_ray.transfer import upload
from cast_ray.trees.edit import Nodes, graft, heaviest

# Lexer states of one grammar, about 2 kB each: what a stranger's grammar may take.
MOST_LEXER_STATES = 50_000
# Label sets whose trees are kept: a job asks for the same one row by row.
LABEL_SETS = 64


class Grammar(Protocol):
    """One request's place in its grammar.

    drafts_help: whether a drafter's candidates are of any use to it.
    """

    drafts_help: bool

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""
        ...

    @property
    def finished(self) -> bool:
        """The output is complete and nothing may follow."""
        ...

    def advance(self, tokens: Sequence[int]) -> int:
        """Take in emitted tokens; how many of them belong to the output: those behind its end do not."""
        ...

    def certain_end(self) -> list[int]:
        """The tokens up to the end of the output where no others can come; empty where that is not certain."""
        ...

    def candidates(self, drafted: Nodes, most: int) -> Nodes:
        """What is worth verifying, at most `most` nodes: drafted candidates that may come, and what is foreseen."""
        ...

    def fill(self, nodes: Nodes, mask: NDArray[np.int32]) -> None:
        """What may come after the root and each of `nodes`, a bit a token: int32 `[nodes + 1, words]`, zeros before.

        `nodes` are some that `candidates` gave.
        """
        ...


class GrammarCompiler:
    """From what a request asks for to its grammar, in one target's tokens. The bridge is built when first needed.

    end_tokens: tokens that end the target's output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        self._bridge: LLTokenizer | None = None
        self._label_tree = lru_cache(maxsize=LABEL_SETS)(self._make_label_tree)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask over the vocabulary."""
        return -(-self._vocab_size // 32)

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request, None when it asks for none; RequestError when there is no such grammar."""
        if params.choice:
            return LabelGrammar(self._label_tree(params.choice))
        if params.regex is not None:
            return self._matcher("regex", params.regex, LLMatcher.grammar_from_regex)
        if params.json_schema is not None:
            return self._matcher("json_schema", params.json_schema, LLMatcher.grammar_from_json_schema)
        if params.json_object:
            return self._matcher("json_object", '{"type": "object"}', LLMatcher.grammar_from_json_schema)
        return None

    def _matcher(self, field: str, text: str, make: Callable[[str], str]) -> MatcherGrammar:
        if self._bridge is None:
            self._bridge = _bridge(self._tokenizer, self._vocab_size, self._end_tokens, field)
        limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._bridge, make(text), log_level=0, limits=limits)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise RequestError(describe(field, text, f"cannot be compiled ({reason})", "Mend or simplify it"))
        return MatcherGrammar(matcher, self.mask_words)

    def _make_label_tree(self, labels: tuple[str, ...]) -> LabelTree:
        spelled = {label: self._tokenizer.encode(label, add_special_tokens=False) for label in labels}
        for label, tokens in spelled.items():
            if max(tokens, default=0) >= self._vocab_size:
                problem = f"has a token that the target, which has {self._vocab_size}, cannot write"
                raise RequestError(describe("choice", label, problem, "Reword the label"))
        return LabelTree(spelled, self._end_tokens)


class MatcherGrammar:
    """A regular expression or JSON, as llguidance matches it. See Grammar."""

    drafts_help = True

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    @property
    def error(self) -> str | None:
        """Why it cannot go on, as a grammar too costly to follow; None while it can."""
        return " ".join(self._matcher.get_error().split())[:300] if self._matcher.is_error() else None

    @property
    def finished(self) -> bool:
        """Nothing may follow, or nothing can be said any more."""
        return self._matcher.is_stopped()

    def advance(self, tokens: Sequence[int]) -> int:
        """Take in emitted tokens; how many of them belong to the output."""
        for count, token in enumerate(tokens):
            if self._matcher.is_stopped():
                return count
            self._matcher.consume_token(token)
        return len(tokens)

    def certain_end(self) -> list[int]:
        """None are certain: a text that the grammar forces may still be written in other tokens."""
        return []

    def candidates(self, drafted: Nodes, most: int) -> Nodes:
        """What of the drafted may come, with the stretch that the grammar forces, in its usual tokens."""
        left = Nodes([], [], [])
        place: dict[int, int] = {-1: -1}

        def see(node: int) -> None:
            if node >= 0:
                place[node] = len(place) - 1
                left.tokens.append(drafted.tokens[node])
                left.parents.append(place[drafted.parents[node]])
                left.masses.append(drafted.masses[node])

        self._walk(drafted, see)
        forced = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        # The walk went in depth first, the order is by mass again.
        return heaviest(graft(left, forced), most)

    def fill(self, nodes: Nodes, mask: NDArray[np.int32]) -> None:
        """What may come after the root and each of `nodes`, as bits."""
        size = self._words * 4

        def see(node: int) -> None:
            self._matcher.unsafe_compute_mask_ptr(mask[node + 1].ctypes.data, size)

        self._walk(nodes, see)

    def _walk(self, nodes: Nodes, see: Callable[[int], None]) -> None:
        """Call `see` with the matcher at the root (-1) and at every node that may be emitted; it comes back."""
        children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
        for node, parent in enumerate(nodes.parents):
            children[parent + 1].append(node)
        matcher = self._matcher

        def go(node: int) -> None:
            see(node)
            if matcher.is_stopped():
                return
            for child in children[node + 1]:
                if matcher.validate_tokens([nodes.tokens[child]]):
                    matcher.consume_token(nodes.tokens[child])
                    go(child)
                    matcher.rollback(1)

        go(-1)


def apply_bits(logits: Tensor, words: NDArray[np.int32]) -> None:
    """Mask `logits` `[n, vocab]` in place where `words` `[n, ceil(vocab / 32)]` has no bit."""
    bits = upload(words, logits.device, torch.int32)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~allowed, float("-inf"))


def _bridge(tokenizer: Any, vocab_size: int, end_tokens: tuple[int, ...], field: str) -> LLTokenizer:
    if not end_tokens:
        problem = "the target has no end-of-sequence token, which such an output ends with"
        raise RequestError(describe(field, "…", problem, "Use choice, or another target"))
    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_tokens))
    except Exception as error:  # llguidance raises what it likes for tokenizers that it cannot read
        problem = f"the target's tokenizer cannot be read for grammars ({' '.join(str(error).split())[:200]})"
        raise RequestError(
            describe(field, type(tokenizer).__name__, problem, "Use choice, or another target")
        ) from None
