"""From what a caller gives to token ids: text, chats and ids, each checked. No request is started here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cast_ray.errors import RequestError, describe
from cast_ray.models.loading import LoadedTarget
from cast_ray.request import Prompt, SamplingParams


def render(prompt: Prompt, loaded: LoadedTarget, vocab_size: int) -> list[int]:
    """Token ids of a prompt; RequestError when it is empty, of no known kind, or has ids the target does not know."""
    if isinstance(prompt, str):
        tokens = list(loaded.tokenizer(prompt)["input_ids"])
    elif isinstance(prompt, list) and prompt and all(isinstance(item, dict) for item in prompt):
        tokens = _render_chat(prompt, loaded)
    elif isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        tokens = cast(list[int], list(prompt))
    else:
        problem = "is neither text, chat messages nor token ids"
        raise RequestError(describe("prompt", prompt, problem, "Give a string, a list of messages, or a list of ids"))
    if not tokens:
        raise RequestError(describe("prompt", prompt, "has no tokens", "Give at least one"))
    # Of rendered text too: a tokenizer may have been given tokens that the model has no embedding for.
    unknown = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if unknown is not None:
        remedy = "Use the target's own tokenizer"
        raise RequestError(describe("prompt", unknown, f"is no token id below {vocab_size}", remedy))
    return tokens


def pair_params(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Parameters for each prompt, from one for all or one for each; RequestError where the two do not fit."""
    if isinstance(prompts, str) or not isinstance(prompts, list | tuple):
        raise RequestError(describe("prompts", prompts, "must be a list of prompts", "Wrap a single prompt in a list"))
    if prompts and isinstance(prompts[0], dict | int):
        problem = "looks like a part of one prompt"
        raise RequestError(describe("prompts", prompts[0], problem, "Wrap the prompt in a list"))
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        problem = f"{len(params)} given for {len(prompts)} prompts"
        raise RequestError(f"sampling_params: {problem}. Give one for all, or one for each.")
    return list(params)


def _render_chat(messages: list[Any], loaded: LoadedTarget) -> list[int]:
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            problem = "must have a role and a content, both text"
            remedy = 'Write {"role": "user", "content": …}'
            raise RequestError(describe(f"messages[{number}]", message, problem, remedy))
    if not loaded.tokenizer.chat_template:
        problem = f"target {loaded.name!r} has no chat template"
        raise RequestError(describe("messages", messages, problem, "Give text prompts, or a chat model"))
    try:
        ids = loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates are code of the model's own and raise what they like
        problem = f"the chat template refuses them ({error})"
        raise RequestError(describe("messages", messages, problem, "See the template's rules")) from None
    return list(ids)
