"""The plain meaning of sampling parameters: one row at a time, one token at a time, the whole prefix each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cast_ray.request import SamplingParams
from cast_ray.sampling.keyed import perturbed_scores

NEVER = float("-inf")


def slow_process(
    logits: torch.Tensor,
    params: SamplingParams,
    context: list[int],
    num_prompt: int,
    bad_words: Sequence[Sequence[int]] = (),
    stops: Sequence[int] = (),
    permitted: Sequence[int] | None = None,
) -> torch.Tensor:
    """Logits `[vocab]` as a request wants them after `context`, as the definitions read; float64.

    permitted: what a grammar allows, None without one.
    """
    p, vocab = params, logits.shape[0]
    out = logits.double().clone()
    if permitted is not None:
        out[[t for t in range(vocab) if t not in permitted]] = NEVER
    if p.allowed_token_ids is not None:
        out[[t for t in range(vocab) if t not in p.allowed_token_ids]] = NEVER
    free = out.clone()
    for word in bad_words:
        before = list(word[:-1])
        if not before or context[-len(before) :] == before:
            out[word[-1]] = NEVER
    if len(context) - num_prompt < p.min_tokens:
        out[list(stops)] = NEVER
    if out.max() == NEVER:
        out = free
    for token, bias in p.logit_bias.items():
        out[token] += bias
    output = context[num_prompt:]
    for token in range(vocab):
        if token in context and p.repetition_penalty != 1:
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        out[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    if p.filtered:
        out[_filter(out / p.temperature, p) == NEVER] = NEVER
    return out


def _filter(scaled: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    if p.min_p:
        probabilities = scaled.softmax(0)
        scaled[probabilities < p.min_p * probabilities.max()] = NEVER
    if p.top_k:
        scaled[scaled < scaled.sort(descending=True).values[min(p.top_k, len(scaled)) - 1]] = NEVER
    if p.top_p < 1:
        probabilities = scaled.softmax(0)
        order = probabilities.argsort(descending=True)
        mass = 0.0
        for place, token in enumerate(order.tolist()):
            if mass >= p.top_p:
                scaled[order[place:]] = NEVER
                break
            mass += float(probabilities[token])
    return scaled


@dataclass
class SlowOutput:
    """tokens; gaps: at each, how far the second best score lay behind; logprobs: of each, the target's own."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@torch.inference_mode()
def slow_decode(
    model: Any,
    prompt: list[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    bad_words: Sequence[Sequence[int]] = (),
    stops: Sequence[int] = (),
) -> SlowOutput:
    """Decode by whole forwards of a Hugging Face model, until a token of `stops` or max_tokens."""
    out = SlowOutput()
    while len(out.tokens) < params.max_tokens and (not out.tokens or out.tokens[-1] not in stops):
        context = prompt + out.tokens
        logits = model(torch.tensor([context])).logits[0, -1].float()
        changed = slow_process(logits, params, context, len(prompt), bad_words, stops)
        scores = perturbed_scores(
            changed[None], torch.tensor([params.temperature]), torch.tensor([seed]), torch.tensor([len(context)])
        )[0]
        best = scores.topk(2)
        out.tokens.append(int(best.indices[0]))
        out.gaps.append(float(best.values[0] - best.values[1]))
        out.logprobs.append(float(logits.log_softmax(0)[out.tokens[-1]]))
    return out
