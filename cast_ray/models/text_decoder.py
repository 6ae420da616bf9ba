"""The text decoder of a model that also sees: the same modules, without what puts pictures among the tokens.

Prompts are text here, so the wrapper does nothing but host work, which also keeps a forward from being captured.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cast_ray.models.loading import LoadedTarget

logger = logging.getLogger(__name__)


def text_alone(loaded: LoadedTarget) -> LoadedTarget:
    """The target with its text decoder and output head in transformers' own class for text, where it has one; else as
    it is. The towers are let go."""
    whole: Any = loaded.model
    config = whole.config.get_text_config()
    if config is whole.config:
        return loaded
    try:
        with torch.device("meta"):
            text: Any = AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)
    except ValueError:  # no such class
        return loaded
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    if type(text.get_decoder()) is not type(decoder) or head is None:
        return loaded
    setattr(text, text.base_model_prefix, decoder)
    text.set_output_embeddings(head)
    if any(tensor.is_meta for tensor in (*text.parameters(), *text.buffers())):
        return loaded  # it has parts that the whole has not
    text.config, text.generation_config = config, whole.generation_config
    logger.info("target %r: its text decoder alone is used", loaded.name)
    return replace(loaded, model=text.requires_grad_(False).eval())
