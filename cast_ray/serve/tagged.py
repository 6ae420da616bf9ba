"""Text that models mark with tags, `<think>` and `<tool_call>`, told apart while it streams.

The tags are those of Qwen, Hermes, SmolLM and others; whether a model uses them is seen in its chat template.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["content", "reasoning", "tool_call"]
TAGS: dict[str, tuple[Kind, str]] = {
    "<think>": ("reasoning", "</think>"),
    "<tool_call>": ("tool_call", "</tool_call>"),
}


@dataclass(frozen=True)
class Part:
    """A stretch of one kind. Tool calls come whole, other text as it comes."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class ChatReader:
    """What a model marks in its answers, as seen in its chat template and, for `thinking`, at the prompt's end."""

    reasoning: bool = False
    tools: bool = False
    thinking: bool = False

    def reader(self, tools_offered: bool) -> TaggedText:
        """For one answer. Tool calls are looked for only where tools were offered."""
        return TaggedText(reasoning=self.reasoning, tools=self.tools and tools_offered, thinking=self.thinking)


class TaggedText:
    """Cuts text at tags as it is pushed. reasoning, tools: which of them to look for, or the tags stay in the content.

    thinking: the prompt ended inside `<think>`, so the text begins there.
    """

    def __init__(self, *, reasoning: bool, tools: bool, thinking: bool = False) -> None:
        wanted = {"reasoning": reasoning, "tool_call": tools}
        self._opening = {tag: about for tag, about in TAGS.items() if wanted[about[0]]}
        self._kind: Kind = "content"
        self._closing: str | None = None
        self._held = ""
        self._trim = False  # spaces before the first word of a stretch behind a tag
        if thinking and reasoning:
            self._kind, self._closing = TAGS["<think>"]
            self._trim = True

    def push(self, text: str) -> list[Part]:
        """Parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            marks = (self._closing,) if self._closing else tuple(self._opening)
            found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                self._emit(parts, self._held[:place], ends=True)
                self._held = self._held[place + len(mark) :]
                self._kind, self._closing = ("content", None) if self._closing else self._opening[mark]
                self._trim = True
                continue
            if self._kind == "tool_call":
                break
            keep = max((_overlap(self._held, mark) for mark in marks), default=0)
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            self._emit(parts, ready, ends=False)
            break
        return parts

    def finish(self) -> list[Part]:
        """The rest. A tool call that was not closed is one if it is whole JSON, else content."""
        rest, self._held = self._held, ""
        parts: list[Part] = []
        if self._kind == "tool_call" and read_tool_call(rest) is None:
            self._kind, rest = "content", f"<tool_call>{rest}"
        self._emit(parts, rest, ends=True)
        return parts

    def _emit(self, parts: list[Part], text: str, ends: bool) -> None:
        if self._kind == "tool_call":
            if ends:
                parts.append(Part("tool_call", text))
            return
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if text:
            parts.append(Part(self._kind, text))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def read_tool_call(text: str) -> dict[str, Any] | None:
    """A call in OpenAI's form, or None where the text is not one."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["name"], "arguments": shown}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
