"""What of a request's parameters depends on the target's vocabulary: checked, and words turned into tokens."""

from __future__ import annotations

from typing import Any

from cast_ray.errors import RequestError, describe
from cast_ray.request import SamplingParams


def check_params(params: SamplingParams, vocab_size: int, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """RequestError for a token that does not exist, or rules that leave none. Returns the bad words' tokens, without
    words that the target cannot write."""
    named = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in named.items():
        unknown = next((token for token in tokens if token >= vocab_size), None)
        if unknown is not None:
            problem = f"is no token of the target, which has {vocab_size}"
            raise RequestError(describe(name, unknown, problem, "Use the target's own tokenizer"))
    words = spell_bad_words(params.bad_words, tokenizer)
    # A tokenizer may have tokens that the target has no logits for.
    words = tuple(word for word in words if max(word) < vocab_size)
    if params.allowed_token_ids is not None:
        banned = {word[0] for word in words if len(word) == 1}
        if banned.issuperset(params.allowed_token_ids):
            problem = "bans every token that allowed_token_ids allows"
            raise RequestError(describe("bad_words", params.bad_words, problem, "Allow some that are not banned"))
    return words


def spell_bad_words(bad_words: tuple[str, ...], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, at the start of a text and, where that is another token, behind a space (vLLM)."""
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        plain = tuple(tokenizer.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if not plain:
            raise RequestError(describe("bad_words", word, "has no tokens", "Leave it out"))
        found[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
    return tuple(found)
