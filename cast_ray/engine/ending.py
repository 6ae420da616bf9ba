"""Where an output ends: a round's tokens cut at the first thing that ends their request, and its text so far.

What ends it first, counted in tokens, is the end: an end or stop token, a stop string, what a grammar allows, or
max_tokens. It is the same wherever rounds part the output.
"""

from __future__ import annotations

from cast_ray.engine.sequence import Ending, Sequence


def take(sequence: Sequence, tokens: list[int]) -> list[int]:
    """Append to the sequence what it keeps of a round's tokens, and return that; sets `ending` where it ends.

    Where only one end is left, such as the rest of a label, it is appended at once; the cache does not hold it.
    Text is made only where it may end the request, by a stop string; it grows into `fresh`. See `show`.
    """
    kept, ending = _cut(sequence, tokens)
    if sequence.emitting is not None:
        count = sequence.emitting.commit(kept)
        if ending is None and count == len(kept) and (rest := sequence.emitting.certain_end()):
            kept, ending = _cut(sequence, kept + rest)
            count += sequence.emitting.commit(kept[count:])
        if count < len(kept) or sequence.emitting.finished:
            kept = kept[:count]
            # The end token may have come as well, and is then the last.
            ending = ending if kept and kept[-1] in sequence.stop_tokens else Ending("stop")
            grammar = sequence.emitting.grammar
            if grammar is not None and grammar.error is not None:
                ending = Ending("error", grammar.error)
    if sequence.text is not None and sequence.params.stop:
        count = _push(sequence, kept, ending)
        if sequence.text.stopped:
            kept, ending = kept[:count], Ending("stop", sequence.text.stop)
    sequence.tokens.extend(kept)
    sequence.ending = ending
    return kept


def show(sequence: Sequence, kept: list[int]) -> None:
    """The text of what `take` kept of a round grows into `fresh`, where that decides nothing and was not done there."""
    if sequence.text is not None and not sequence.params.stop:
        _push(sequence, kept, sequence.ending)


def _push(sequence: Sequence, kept: list[int], ending: Ending | None) -> int:
    """Tokens of `kept` up to where the text ends; all of them where it goes on."""
    assert sequence.text is not None
    hidden = ending is not None and ending.hides_last and not sequence.params.include_stop_str_in_output
    text, count = sequence.text.push(kept[:-1] if hidden else kept)
    sequence.fresh += text
    return count


def _cut(sequence: Sequence, tokens: list[int]) -> tuple[list[int], Ending | None]:
    kept = tokens[: sequence.max_length - len(sequence.tokens)]
    for place, token in enumerate(kept):
        if token in sequence.stop_tokens:
            asked = token if token in sequence.params.stop_token_ids else None
            return kept[: place + 1], Ending("stop", asked, hides_last=True)
    return kept, Ending("length") if len(sequence.tokens) + len(kept) == sequence.max_length else None
