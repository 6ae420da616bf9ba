"""The prompts of a training job: read from a file, or started by the openings from which the target writes its own.

Prompts are ordered so that every beginning of the list holds all domains alike: a job that is cut short stays balanced.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cast_ray.errors import InputError, RequestError, describe
from cast_ray.request import ChatMessage, Prompt, derive_seed

# Beginnings of a user's turn by domain. The empty one leaves the topic to the target.
OPENINGS: dict[str, tuple[str, ...]] = {
    "chat": (
        "",
        "What is",
        "How do I",
        "Explain",
        "Write a",
        "Write an email to",
        "Can you",
        "Give me a list of",
        "Imagine you are",
        "Summarize the following",
        "Compare",
        "Describe",
        "Why",
        "Read the passage below and",
        "Rewrite the",
        "Which of the following",
        "Tell me about",
        "I want to",
        "Suggest",
        "Pretend to be",
    ),
    "maths": (
        "Find the",
        "Let $",
        "What is the value of $",
        "Solve for $x",
        "Compute",
        "If $",
        "How many",
        "Simplify",
        "A rectangle has",
        "Evaluate $\\",
        "What is the smallest positive integer",
        "Suppose that $f(x)",
        "The sum of",
        "In triangle $ABC$,",
        "Factor the expression",
    ),
    "code": (
        "Write a Python function",
        "Write a python function to",
        "Complete this Python function.\n\n```python\ndef ",
        "Complete this Python function.\n\n```python\nfrom typing import List\n\n\ndef ",
        "Implement a Python function that",
        "Write a function to find",
        "Write a program that",
        "Fix the following code:\n\n```python\n",
        "Create a class",
        "Explain what this code does:\n\n```python\n",
    ),
}

# A sentence that no chat template can hold by itself.
_PLACEHOLDER = "cast ray opening placeholder"


@dataclass(frozen=True)
class TrainingPrompt:
    """One prompt. name is unique in the job; the seed of its answer is made of it."""

    name: str
    domain: str
    prompt: Prompt


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """The prompts of a JSONL file. Raises InputError naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at the other breaks that text may hold
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(describe("prompts", str(path), f"cannot be read ({error})", "Check the path")) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise InputError(describe("prompts", f"{path}:{number}", f"is no JSON ({error})", "Mend it")) from None
        prompt = row.get("messages") or row.get("prompt") if isinstance(row, dict) else None
        if not prompt:
            problem = "has neither messages nor prompt"
            raise InputError(describe("prompts", f"{path}:{number}", problem, 'Write {"prompt": "…"} lines'))
        found.append(TrainingPrompt(f"{number:06d}", str(row.get("domain", path.stem)), prompt))
    if not found:
        raise InputError(describe("prompts", str(path), "holds no prompt", "Give one JSON object a line"))
    return found


def interleave(prompts: list[TrainingPrompt], seed: int) -> list[TrainingPrompt]:
    """Shuffled within each domain, then one of each domain in turn for as long as it has any."""
    by_domain: dict[str, list[TrainingPrompt]] = defaultdict(list)
    for item in sorted(prompts, key=lambda item: derive_seed(seed, "order", item.domain, item.name)):
        by_domain[item.domain].append(item)
    order = sorted(by_domain)
    longest = max((len(items) for items in by_domain.values()), default=0)
    return [by_domain[domain][i] for i in range(longest) for domain in order if i < len(by_domain[domain])]


def opening(tokenizer: Any, seed: int, number: int) -> tuple[str, str, list[int]]:
    """The start of a user's turn: its domain, its text so far, and the token ids up to there.

    The tokens before the turn's text are the chat template's own, found by rendering a placeholder and cutting at it;
    without a template a start is the text alone.
    """
    domains = sorted(OPENINGS)
    domain = domains[number % len(domains)]
    text = OPENINGS[domain][derive_seed(seed, "opening", number) % len(OPENINGS[domain])]
    before = turn_opening(tokenizer)
    tokens = list(tokenizer(before + text, add_special_tokens=not before)["input_ids"])
    if not tokens:  # no template, no text, and a tokenizer that adds nothing
        tokens = [tokenizer.eos_token_id or 0]
    return domain, text, tokens


def turn_opening(tokenizer: Any) -> str:
    """What the chat template writes before a first user turn's text; empty where there is no template."""
    if not tokenizer.chat_template:
        return ""
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates are code of the model's own and raise what they like
        raise RequestError(
            describe("chat_template", "user turn", f"cannot be rendered ({error})", "Give prompts with --prompts")
        ) from None
    return rendered.partition(_PLACEHOLDER)[0]


def as_prompt(tokenizer: Any, text: str) -> Prompt:
    """A finished user turn as the prompt that is answered: a chat where the target has a template, else the text."""
    message: ChatMessage = {"role": "user", "content": text}
    return [message] if tokenizer.chat_template else text
