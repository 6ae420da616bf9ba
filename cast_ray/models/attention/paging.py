"""Which pages and which keys a kernel over the paged pool visits: index arrays in FlashInfer's form.

Requests of one or more groups follow each other. The host knows all lengths, so everything but the page numbers is made
there and nothing waits for the device. No key or query is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cast_ray.models.attention.base import Group
from cast_ray.transfer import upload

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The keys of each request that are visited: token indices from `first` to before `last`, both `[b]`.

    first: multiples of the page size. An empty span has last = first.
    """

    first: Counts
    last: Counts

    @property
    def keys(self) -> Counts:
        return self.last - self.first


@dataclass(frozen=True)
class PagedArrays:
    """What FlashInfer's `plan` takes, int32; all on the host but the page numbers.

    qo_indptr: `[b + 1]` rows of each request. kv_indptr: `[b + 1]` its places in `indices`, `[pages]` on the device.
    last_page_len: `[b]` keys on its last page; a whole page where it has none, which FlashInfer counts as 0 keys.
    keys: `[b]` of each request.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    keys: Tensor
    indices: Tensor


def lengths_of(groups: Sequence[Group]) -> Counts:
    """New tokens of every request of `groups`, `[b]`."""
    return np.asarray([n for group in groups for n in group.lengths], dtype=np.int64)


def contexts_of(groups: Sequence[Group]) -> Counts:
    """Cached tokens of every request of `groups`, `[b]`."""
    return np.asarray([n for group in groups for n in group.contexts], dtype=np.int64)


def whole(groups: Sequence[Group], page_size: int, window: int | None = None) -> Span:
    """All keys of every request, less the pages that lie outside the window of all its new tokens."""
    contexts = contexts_of(groups)
    first = np.zeros_like(contexts)
    if window is not None:  # new tokens stand at the context's end or later
        first = np.maximum(contexts - window + 1, 0) // page_size * page_size
    return Span(first, contexts + lengths_of(groups))


def halves(groups: Sequence[Group], page_size: int) -> tuple[Span, Span]:
    """The whole pages of the context, which every new token sees, and what is left with the new tokens."""
    contexts = contexts_of(groups)
    edge = contexts // page_size * page_size
    return Span(np.zeros_like(contexts), edge), Span(edge, contexts + lengths_of(groups))


def paged_arrays(groups: Sequence[Group], span: Span, page_size: int, indices: Tensor | None = None) -> PagedArrays:
    """The arrays of a plan over `span`. indices: a buffer that page numbers are written to by somebody else."""
    pages = -(-span.keys // page_size)
    if indices is None:
        parts, at = [], 0
        for group in groups:
            some = slice(at, at + len(group.lengths))
            parts.append(_page_numbers(group.tables, span.first[some] // page_size, pages[some]))
            at += len(group.lengths)
        indices = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        indices = indices[: int(pages.sum())]
    device = groups[0].tables.device
    return PagedArrays(
        qo_indptr=starts_of(lengths_of(groups), device),
        kv_indptr=starts_of(pages, device),
        last_page_len=_for(device, span.keys - (pages - 1) * page_size),
        keys=_for(device, span.keys),
        indices=indices,
    )


def starts_of(counts: Counts, device: torch.device) -> Tensor:
    """`[b]` -> `[b + 1]` int32 on the host, to be copied to `device`: where each begins, and the end of the last."""
    return _for(device, np.concatenate([[0], counts.cumsum()]))


def _for(device: torch.device, numbers: Counts) -> Tensor:
    """int32 on the host, in memory from where a copy to a CUDA device waits for nothing."""
    tensor = torch.from_numpy(numbers.astype(np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _page_numbers(tables: Tensor, first: Counts, pages: Counts) -> Tensor:
    """From tables `[b, P]`, `pages[i]` numbers of request i from its page `first[i]` on, `[sum(pages)]` int32."""
    total, device = int(pages.sum()), tables.device
    shift = first - (pages.cumsum() - pages)
    facts = upload(np.concatenate([pages, shift]), device).view(2, -1)
    # The size is told: it would be read from the device.
    request = torch.arange(len(pages), device=device).repeat_interleave(facts[0], output_size=total)
    place = torch.arange(total, device=device) + facts[1, request]
    return tables[request, place].to(torch.int32)
