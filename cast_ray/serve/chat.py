"""Chats whose template is given more than messages, and what a template says about the answers of its model."""

from __future__ import annotations

from typing import Any

from cast_ray.errors import RequestError
from cast_ray.serve.tagged import ChatReader
from cast_ray.serve.wire import Ask

# What a template is never given by a client: how its text is made, and objects of Python's.
RESERVED = frozenset(
    {"tokenize", "return_dict", "return_tensors", "chat_template", "conversation", "messages", "tools", "documents",
     "padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)  # fmt: skip
# Tokens at the end of a prompt that may spell an opening tag.
LAST_TOKENS = 8


def chat_reader(tokenizer: Any, prompt: list[int]) -> ChatReader:
    """Models say in their template which tags they were trained on; some prompts end inside the first of them."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = "".join(template.values())
    reasoning = "<think>" in template or "</think>" in template
    thinking = reasoning and tokenizer.decode(prompt[-LAST_TOKENS:]).rstrip().endswith("<think>")
    return ChatReader(reasoning=reasoning, tools="<tool_call>" in template, thinking=thinking)


def render_chat(tokenizer: Any, ask: Ask) -> list[int]:
    """Token ids of a chat with tools or template arguments. RequestError where the template refuses them.

    Templates come with the model. transformers runs them in Jinja's sandbox.
    """
    given = dict(ask.template)
    if bad := sorted(RESERVED.intersection(given)):
        raise RequestError(f"chat_template_kwargs: cannot set {', '.join(bad)}. Leave that out.")
    if not tokenizer.chat_template:
        raise RequestError("messages: the model has no chat template. Use /v1/completions, or a chat model.")
    given.setdefault("add_generation_prompt", True)
    try:
        ids = tokenizer.apply_chat_template(ask.prompt, tools=ask.tools, tokenize=True, return_dict=False, **given)
    except Exception:  # a template is code of the model's own and raises what it likes, prompts in it
        problem = "the model's chat template refuses these messages, tools or arguments"
        raise RequestError(f"messages: {problem}. See the template's rules.") from None
    if not ids:
        raise RequestError("messages: are no tokens once the template has written them. Give at least one.")
    return list(ids)
