"""The chunks of a streamed answer, as OpenAI writes them. What they are made of, and who gets them, is `answers`'s."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cast_ray.request import Completion
from cast_ray.serve.shapes import chat_delta, chat_logprobs, completion_logprobs, finish_reason, head
from cast_ray.serve.tagged import ChatReader, TaggedText
from cast_ray.serve.wire import Piece

if TYPE_CHECKING:
    from cast_ray.serve.answers import Question

Body = dict[str, Any]


class ChunkWriter:
    """Chunks of one answer, choice by choice. tokens: written so far, whoever ends."""

    def __init__(self, question: Question) -> None:
        self._question = question
        kind = "chat.completion.chunk" if question.chat else "text_completion"
        self.head = head(kind, question.answer_id, question.created, question.model)
        self._texts: list[TaggedText | None] = [None] * len(question.asks)
        self._calls = [0] * len(question.asks)
        self._rounds = [0] * len(question.asks)
        self._places = [0] * len(question.asks)  # characters of the tokens whose log probabilities are out
        self.tokens = 0
        self._completions: list[Completion | None] = [None] * len(question.asks)

    @property
    def completions(self) -> list[Completion]:
        """Those that there are, in the order of their choices."""
        return [one for one in self._completions if one is not None]

    def opening(self, index: int) -> Body:
        """A chat's first chunk names the role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunks(self, index: int, piece: Piece) -> list[Body]:
        """What a piece has to show, and at the end why it ended.

        Its trees and log probabilities come with the first chunk, and with one of no text where there is no text yet.
        """
        self._rounds[index] += piece.rounds
        self.tokens += len(piece.token_ids)
        shown = self._shown(index, piece)
        if not shown and (piece.trees or piece.logprobs):
            shown = [{"delta": {}} if self._question.chat else {"text": ""}]
        found = []
        for place, part in enumerate(shown):
            logprobs = self._logprobs(index, piece) if not place else None
            choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": None}
            found.append(self._chunk(choice, index, piece, tells=not place))
        if piece.completion is not None:
            self._completions[index] = piece.completion
            found.append(self._chunk(self._ending(index, piece.completion)))
        return found

    def _shown(self, index: int, piece: Piece) -> list[Body]:
        """The text of a piece, as the part of a choice that holds it: of a chat there may be several."""
        if not self._question.chat:
            return [{"text": piece.text}] if piece.text else []
        text = self._texts[index]
        if text is None:
            text = (piece.reader or ChatReader()).reader(self._question.tools_offered)
            self._texts[index] = text
        found = []
        for part in [*text.push(piece.text), *(text.finish() if piece.completion is not None else ())]:
            delta, self._calls[index] = chat_delta(part, self._calls[index])
            found.append({"delta": delta})
        return found

    def _logprobs(self, index: int, piece: Piece) -> Body | None:
        words = piece.words or {}
        if self._question.chat:
            return chat_logprobs(piece.logprobs or None, words)
        found = completion_logprobs(piece.logprobs or None, words, self._places[index])
        if found is not None:
            self._places[index] += sum(map(len, found["tokens"]))
        return found

    def _ending(self, index: int, completion: Completion) -> Body:
        shared = {
            "index": index,
            "logprobs": None,
            "finish_reason": finish_reason(completion, bool(self._calls[index])),
            "stop_reason": completion.stop_reason,
            "seed": completion.seed,
        }
        return {**shared, "delta": {}} if self._question.chat else {**shared, "text": ""}

    def _chunk(self, choice: Body, index: int = 0, piece: Piece | None = None, *, tells: bool = True) -> Body:
        """tells: whether it is the first of its piece, the one that has the trees."""
        chunk: Body = {**self.head, "choices": [choice]}
        if self._question.request.usage_wanted:
            chunk["usage"] = None
        if piece is not None and self._question.request.rounds_wanted:
            chunk["round"] = {"number": self._rounds[index], "tokens": len(piece.token_ids)}
            if piece.trees and tells:
                chunk["round"]["trees"] = [asdict(tree) for tree in piece.trees]
        return chunk
