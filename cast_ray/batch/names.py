"""Which rows are which: sixteen bytes stand for a row's name, however long it is, so that millions fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.bytes_]
_BYTES = 16


def digests(names: Iterable[Any]) -> Digests:
    """One digest a name, of its text: a number in the input may come back from the output as text."""
    found = [hashlib.blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest() for name in names]
    return np.array(found, dtype=f"S{_BYTES}")


def join(parts: Iterable[Digests]) -> Digests:
    """All of them in order; none at all is an empty array."""
    return np.concatenate([digests(()), *parts])


def repeats(names: Digests) -> npt.NDArray[np.int64]:
    """Positions of those that stood earlier already, in order."""
    _, first = np.unique(names, return_index=True)
    again = np.ones(len(names), dtype=bool)
    again[first] = False
    return np.flatnonzero(again)


def among(names: Digests, known: Digests) -> npt.NDArray[np.bool_]:
    """For each name whether it is in known, which is sorted."""
    if not len(known):
        return np.zeros(len(names), dtype=bool)
    at = np.minimum(np.searchsorted(known, names), len(known) - 1)
    return np.asarray(known[at] == names)
