"""Where compiled kernels are kept: in cast_ray's own cache, which every copy of these sources shares.

numba's own places go by the path of the source file; Ray unpacks a job's files somewhere else each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from filelock import FileLock
from numba import config
from numba.core.caching import InTreeCacheLocator

from cast_ray.config import cache_dir

FOLDER = "native"


class HomeLocator(InTreeCacheLocator):
    """numba's answer to where a function's code is kept and whether it is of the present source."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(cache_dir() / FOLDER)


@contextmanager
def kept_in_home() -> Iterator[None]:
    """Functions made inside are kept in cast_ray's cache, or in the user's own of numba where that cannot be written.

    One process at a time: those that start together would each compile the same, but so they find the first one's.
    """
    before = config.CACHE_LOCATOR_CLASSES
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{HomeLocator.__name__},UserWideCacheLocator"
    lock = FileLock(cache_dir() / f"{FOLDER}.lock")
    with suppress(OSError):  # a cache that cannot be written: compile without waiting for others
        lock.acquire()
    try:
        yield
    finally:
        config.CACHE_LOCATOR_CLASSES = before
        lock.release()
