"""Log probabilities that requests ask for: of a round's tokens, which come to the host with the rest of it, and of
prompts. They are the target's own, before any rule of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cast_ray.engine.sequence import Sequence as Request
from cast_ray.request import TokenLogprob
from cast_ray.sampling.emitting import Emitting
from cast_ray.transfer import upload
from cast_ray.trees.accept import Accepted

# Scores that are made into log probabilities at once: a few copies of them are a small part of a device.
AT_ONCE = 1 << 24


class PathScores:
    """Of the requests of a round that ask for the log probabilities of its tokens. asking: by index in the batch."""

    def __init__(self, asking: Mapping[int, Emitting], batch: int) -> None:
        self._asking = {b: state for b, state in asking.items() if state.logprobs is not None}
        self._batch = batch
        self._top = max((state.params.logprobs or 0 for state in self._asking.values()), default=0)

    def find(self, logits: Tensor, starts: Tensor, accepted: Accepted, *, fixed: bool) -> dict[str, Tensor]:
        """Parts of the round's read-back, nothing where nobody asks: `[B, P]` values and ids, zeros for other requests.

        logits: `[rows, vocab]`, the target's own; starts: `[B]` row of each root. fixed: score whole paths, however
        many of them are committed, so that nothing waits for the device.
        """
        if not self._asking:
            return {}
        at = upload(list(self._asking), logits.device)
        entries = accepted.path.shape[1] if fixed else int(accepted.lengths[at].max())
        rows = (starts[at, None] + accepted.path[at, :entries]).reshape(-1)
        values, ids = score(logits, rows, accepted.tokens[at, :entries].reshape(-1), self._top)
        return {"logprobs": self._spread(values, at), "likeliest": self._spread(ids, at)}

    def tell(self, read: Mapping[str, Tensor], committed: Sequence[Sequence[int]]) -> None:
        """Give the requests theirs. read: what came back; committed: tokens that each request of the batch kept."""
        for b, state in self._asking.items():
            assert state.logprobs is not None
            count, top = len(committed[b]), state.params.logprobs or 0
            values = read["logprobs"][b].view(-1, self._top + 1)[:count]
            ids = read["likeliest"][b].view(-1, self._top)[:count] if top else torch.zeros(count, 0)
            state.logprobs += _reported(committed[b], values[:, : top + 1], ids[:, :top])

    def _spread(self, values: Tensor, at: Tensor) -> Tensor:
        flat = values.reshape(at.shape[0], -1)
        return flat.new_zeros(self._batch, flat.shape[1]).index_copy_(0, at, flat)


def score_prompt(request: Request, start: int, logits: Tensor) -> None:
    """Report the log probabilities of prompt tokens. logits: `[n, vocab]` behind the tokens from `start` on."""
    state = request.emitting
    assert state is not None
    assert state.prompt_logprobs is not None
    # Computed before, when the request was preempted; or the output's, behind the prompt.
    first, last = len(state.prompt_logprobs), min(start + 1 + logits.shape[0], request.num_prompt)
    if first < last:
        rows = logits[first - start - 1 : last - start - 1]
        tokens = request.tokens[first:last]
        state.prompt_logprobs += token_logprobs(rows, tokens, state.params.prompt_logprobs or 0)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log probabilities of `tokens` (n) under `logits` `[n, vocab]`, with the `top` likeliest of each row."""
    rows = torch.arange(len(tokens), device=logits.device)
    return _reported(tokens, *score(logits, rows, upload(tokens, logits.device), top))


def score(logits: Tensor, rows: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """`[n, 1 + top]` log probabilities of `tokens` `[n]` and of the likeliest in `rows` `[n]`, and `[n, top]` their
    ids."""
    at_once = max(1, AT_ONCE // logits.shape[1])
    values, ids = [], []
    for some, wanted in zip(rows.split(at_once), tokens.split(at_once), strict=True):
        logprobs = logits.index_select(0, some).float().log_softmax(dim=-1)
        best = logprobs.topk(top, dim=1)
        values.append(torch.cat([logprobs.gather(1, wanted[:, None]), best.values], dim=1))
        ids.append(best.indices)
    return torch.cat(values), torch.cat(ids)


def _reported(tokens: Sequence[int], values: Tensor, ids: Tensor) -> list[TokenLogprob]:
    return [
        TokenLogprob(token, row[0], tuple(zip(likeliest, row[1:], strict=True)))
        for token, row, likeliest in zip(tokens, values.tolist(), ids.tolist(), strict=True)
    ]
