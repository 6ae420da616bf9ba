"""What one request asks for that changes the target's logits, and the counts that its penalties go by.

It changes no logits, see `sampling.processors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cast_ray.request import SamplingParams
from cast_ray.transfer import upload

NEVER = float("-inf")


class Counts:
    """How often one request's tokens came, kept up to date as they are committed: `[vocab]` float32 each.

    output: times in the output. prompt: 1 where the prompt has the token; None without a repetition penalty.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(vocab_size, device=device)
        self.prompt: Tensor | None = None
        if params.repetition_penalty != 1:
            self.prompt = torch.zeros(vocab_size, device=device)
            self.prompt.index_fill_(0, upload(prompt, device), 1.0)

    def add(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        index = upload(tokens, self.output.device)
        self.output.index_add_(0, index, torch.ones_like(index, dtype=self.output.dtype))


@dataclass
class Rules:
    """What one request asks for, and what it is counted by.

    bad_words: token sequences that may not come to stand in the context. stops: the tokens that min_tokens bans.
    counts: None without penalties.
    """

    params: SamplingParams
    num_prompt: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    stops: tuple[int, ...] = ()
    allowed: Tensor | None = None
    counts: Counts | None = None
    vocab_size: int = 0
    _draft_bias: Tensor | None = None

    def draft_bias(self, device: torch.device) -> Tensor | None:
        """What to add to a drafter's log probabilities: `[vocab]` float32; None where it is nothing."""
        if self._draft_bias is None and (self.allowed is not None or self.params.logit_bias):
            bias = torch.zeros(self.vocab_size, device=device)
            if self.allowed is not None:
                bias.masked_fill_(~self.allowed, NEVER)
            for token, value in self.params.logit_bias.items():
                bias[token] += value / (self.params.temperature or 1.0)
            self._draft_bias = bias
        return self._draft_bias

    @property
    def memory(self) -> int:
        """Context tokens that bad words look back at."""
        return max((len(word) - 1 for word in self.bad_words), default=0)

    @property
    def first_free(self) -> int:
        """Place of the first token, prompt included, that min_tokens lets be a stop token."""
        return self.num_prompt + self.params.min_tokens


def make_rules(
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    bad_words: Sequence[Sequence[int]] = (),
    stops: Sequence[int] = (),
    vocab_size: int,
    device: torch.device,
) -> Rules | None:
    """The rules of a request, None when it asks for nothing that changes logits."""
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    stops = tuple(stops) if params.min_tokens else ()
    asked = penalised or params.logit_bias or bad_words or params.allowed_token_ids or stops or params.filtered
    if not asked:
        return None
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        allowed.index_fill_(0, upload(params.allowed_token_ids, device), True)
    counts = Counts(params, prompt, vocab_size, device) if penalised else None
    words = tuple(tuple(word) for word in bad_words)
    return Rules(params, len(prompt), words, stops, allowed, counts, vocab_size)
