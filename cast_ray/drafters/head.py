"""The target's output head as a drafter uses it: scaled, capped, and over a shortlist of tokens where there is one.

A folder may hold a shortlist in `draft_vocab.safetensors` (`token_ids` `[n]` int64): the tokens worth proposing. Most
of a small drafter's time is the head over the whole vocabulary; a token not proposed costs speed, never output.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cast_ray.drafters.checkpoint import DFlashConfig
from cast_ray.errors import DrafterError, describe
from cast_ray.models.linear import pack_linears

SHORTLIST = "draft_vocab.safetensors"
REMEDY = "Remove the file to draft over all tokens"


class DraftHead:
    """head: the target's own; shortlist: `[n]` int64 token ids, or None for the whole vocabulary."""

    def __init__(self, head: nn.Module, config: DFlashConfig, shortlist: Tensor | None = None) -> None:
        self._config = config
        self._shortlist = shortlist
        self._head = head if shortlist is None else _rows_of(head, shortlist)

    @property
    def size(self) -> int | None:
        """Tokens of the shortlist, None without one."""
        return None if self._shortlist is None else self._shortlist.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., n]` float32."""
        logits = self._head(hidden).float() * self._config.output_multiplier
        if self._config.softcap is not None:
            logits = torch.tanh(logits / self._config.softcap) * self._config.softcap
        return logits

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` greatest logits along the last dimension, and their token ids in the target's vocabulary."""
        values, index = logits.topk(min(count, logits.shape[-1]), dim=-1)
        return values, index if self._shortlist is None else self._shortlist[index]


def read_shortlist(folder: Path, vocab_size: int, device: torch.device) -> Tensor | None:
    """The folder's shortlist, None where it has none; DrafterError when it does not fit the vocabulary."""
    path = folder / SHORTLIST
    if not path.exists():
        return None
    try:
        ids = load_file(path)["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        problem = f"cannot be read ({error})"
        raise DrafterError(describe("drafter", str(path), problem, REMEDY)) from None
    fits = ids.ndim == 1 and ids.dtype == torch.int64 and 0 < ids.numel() == ids.unique().numel()
    if not fits or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        problem = f"must hold distinct int64 token ids below {vocab_size}"
        raise DrafterError(describe("drafter", str(path), problem, REMEDY))
    return ids.to(device)


def _rows_of(head: nn.Module, shortlist: Tensor) -> nn.Module:
    """The head's rows for these tokens, as a layer of its own."""
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    small = nn.Linear(weight.shape[1], shortlist.shape[0], bias=bias is not None, device="meta").requires_grad_(False)
    small.weight = nn.Parameter(weight.detach()[shortlist], requires_grad=False)
    if isinstance(bias, Tensor):
        small.bias = nn.Parameter(bias.detach()[shortlist], requires_grad=False)
    holder = nn.Sequential(small)
    pack_linears(holder, exact=False)
    return holder
