"""From groups and a layer's kind to the calls of FlashInfer that attend them, each of one mask mode.

Trees want a mask of their own, prompt chunks and blocks do not: two *sections*, each planned by itself. A tree of a
root alone is plain decoding and needs no mask: its one row sees all keys. A section's *part* is one call of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cast_ray.models.attention.base import Group, Layer
from cast_ray.models.attention.paging import Span, contexts_of, halves, whole

# Rows of a forward up to which a mask over a short context is cheap.
FEW_ROWS = 256


@dataclass(frozen=True)
class Kind:
    """What of a layer a plan depends on; layers of one kind share it."""

    heads: int
    scaling: float
    causal: bool
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, layer: Layer, heads: int) -> Kind:
        return cls(heads, layer.scaling, layer.causal, layer.window, layer.softcap)


@dataclass(frozen=True)
class Section:
    """Groups whose rows follow each other, from row `start`, planned together. masked: each row has its own mask."""

    groups: tuple[Group, ...]
    masked: bool

    @property
    def start(self) -> int:
        return self.groups[0].start

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True)
class Part:
    """One call: which keys, and how they are masked.

    place: where those keys are: from the window on to the end, the context's whole pages, or the rest. masked: by bits
    that hold everything, the window too. window_left: rows that a row sees before its own, -1 for all; only where rows
    are positions.
    """

    span: Span
    place: Literal["whole", "before", "rest"] = "whole"
    window: int | None = None
    masked: bool = False
    causal: bool = False
    window_left: int = -1


def sections_of(groups: Sequence[Group], *, joined: bool) -> list[Section]:
    """The sections of a forward; joined: one for all groups, chunks masked like trees where there are trees."""
    if joined and groups:
        return [Section(tuple(groups), any(_is_masked(group) for group in groups))]
    sections: list[Section] = []
    for group in groups:
        masked = _is_masked(group)
        if sections and sections[-1].masked == masked:
            sections[-1] = Section((*sections[-1].groups, group), masked)
        else:
            sections.append(Section((group,), masked))
    return sections


def parts_of(section: Section, kind: Kind, page_size: int, *, split: bool) -> list[Part]:
    """The calls that attend a section in layers of a kind.

    split: a masked section's whole context pages are attended without a mask, the rest with one, and both merged.
    Layers with a window are not split: the pages before the window are left out, so their masks are small anyway.
    """
    window = kind.window
    span = whole(section.groups, page_size, window)
    masked = section.masked
    if window is not None and not masked and not kind.causal:
        # A block that sees both ways looks at most its own length ahead.
        masked = any(group.mask is None and max(group.lengths) > window for group in section.groups)
    if masked and split and window is None:
        before, rest = halves(section.groups, page_size)
        return [Part(before, "before"), Part(rest, "rest", masked=True)]
    if masked:
        return [Part(span, window=window, masked=True)]
    return [Part(span, window=window, causal=kind.causal, window_left=-1 if window is None else window - 1)]


def pays_to_split(section: Section, least: int) -> bool:
    """Whether a masked section has a context from which its pages are better attended apart; see `split_context`."""
    return section.masked and int(contexts_of(section.groups).max()) >= split_context(section.rows, least)


def split_context(rows: int, least: int) -> int:
    """The context to split from: `least` up to FEW_ROWS rows, and less for more, since masks grow with both."""
    return least * FEW_ROWS // max(rows, FEW_ROWS)


def _is_masked(group: Group) -> bool:
    return group.mask is not None and max(group.lengths) > 1
