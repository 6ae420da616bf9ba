"""From token ids to text while they come: valid UTF-8 only, and the same text as decoding all of them at once.

Also stop strings, which care neither for the borders of tokens nor of rounds. Nothing here ends a request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
# How tokenizers spell a token that is a single byte of a character (Llama's byte fallback).
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDetokeniser:
    """Text of tokens as they are pushed; what was returned, put together, is `tokenizer.decode` of all of them.

    A token's text depends on those around it: characters of several tokens, a space that only the first word loses. So
    a window is decoded, of the last tokens whose text is out and those whose text is not, and its new end is returned
    once it cannot change any more.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        added = tokenizer.added_tokens_decoder if skip_special_tokens else {}
        self._skipped = frozenset(token for token, about in added.items() if about.special)
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text is out
        self._shown_text = ""  # the window's text that is out

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; the text that is certain now and was not before, possibly none."""
        # A skipped token in the window would leave its neighbours without the context that they are decoded in.
        new = [token for token in token_ids if token not in self._skipped]
        if not new:
            return ""
        self._window += new
        text = self._decode(self._window)
        # An unfinished character is shown as a replacement character. Of a run of byte tokens none is certain before
        # its end: a later byte that fits no character makes replacements of the whole run.
        if text.endswith(REPLACEMENT) or not text.startswith(self._shown_text) or self._is_byte(new[-1]):
            return ""
        added = text[len(self._shown_text) :]
        del self._window[: self._shown]
        self._shown = len(self._window)
        self._shown_text = self._decode(self._window)
        return added

    def flush(self) -> str:
        """The rest, when no more tokens come; an unfinished character is a replacement character then."""
        text = self._decode(self._window)[len(self._shown_text) :]
        self._window, self._shown, self._shown_text = [], 0, ""
        return text

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, **self._options)) if tokens else ""

    def _is_byte(self, token: int) -> bool:
        spelled = self._tokenizer.convert_ids_to_tokens(token)
        return spelled is None or _BYTE_TOKEN.fullmatch(spelled) is not None


class StopChecker:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the start of one.

    The first is the one that is complete first, character by character, and of those complete at the same character
    the longest: so it depends neither on the pieces nor on the order of the stop strings.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self.stop is not None

    def push(self, text: str, armed: bool = True) -> str:
        """Take in text; the text that may be shown. Sets `stop` when a stop string is complete.

        armed: whether a stop string that is completed by this text counts.
        """
        if not text or self.stopped:
            return ""
        # Whatever stop string the new text completes begins in what is held.
        whole = self._held + text
        found = self._find(whole, len(self._held)) if armed else None
        if found is not None:
            self.stop, self._held = whole[slice(*found)], ""
            return whole[: found[1] if self._include else found[0]]
        kept = len(whole) - self._start_of_stop(whole)
        self._held = whole[kept:]
        return whole[:kept]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, new: int) -> tuple[int, int] | None:
        """(start, end) of the first stop string that ends behind character `new`."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, new + 1 - len(stop)))
            if start >= 0:
                end = start + len(stop)
                if best is None or end < best[1] or (end == best[1] and start < best[0]):
                    best = (start, end)
        return best

    def _start_of_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops if len(stop) > length):
                return length
        return 0


class OutputText:
    """The text of one request's output as its tokens are committed, cut at the first stop string.

    text: all that may be shown so far. A stop string counts when it is completed by a token behind the first
    `min_tokens`; the output ends with that token, its text where the stop string begins (or ends, if it is included).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._detokeniser = IncrementalDetokeniser(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        self._checker = StopChecker(stop, include_stop_str_in_output) if stop else None
        self._min_tokens = min_tokens
        self._tokens = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that may be shown so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stop(self) -> str | None:
        """The stop string that came."""
        return self._checker.stop if self._checker is not None else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self.stop is not None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Take in committed tokens: (text that may be shown now, how many of the tokens the output keeps)."""
        if self._checker is None:
            self._tokens += len(token_ids)
            text = self._detokeniser.push(token_ids)
            self._pieces.append(text)
            return text, len(token_ids)
        shown, kept = [], 0
        for token in token_ids:
            # Token by token, so that the end is the same whatever a round committed at once.
            self._tokens += 1
            kept += 1
            shown.append(self._checker.push(self._detokeniser.push([token]), self._tokens > self._min_tokens))
            if self._checker.stopped:
                break
        self._pieces += shown
        return "".join(shown), kept

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        rest = self._detokeniser.flush()
        if self._checker is not None:
            if self._checker.stopped:
                return ""
            rest = self._checker.push(rest, self._tokens > self._min_tokens) + self._checker.flush()
        self._pieces.append(rest)
        return rest
