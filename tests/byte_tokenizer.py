"""A byte-level tokenizer small enough for tiny models: a token for each byte, some longer ones, an end token."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = [("Ġ", "t"), ("h", "e"), ("Ã", "©"), ("e", "s"), ("y", "es"), ("n", "o"), ("n", "a"), ("m", "e"), ("na", "me")]


@lru_cache
def byte_level() -> Any:
    """The tokenizer; `len` of it is the vocabulary, its end token is `<end>`."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
