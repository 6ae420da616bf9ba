"""The Ray cluster of a command: the one that it is connected to, else the one in RAY_ADDRESS, else a local one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A connection to a cluster, ended again if it was made here."""
    import ray

    if ray.is_initialized():
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    else:
        # Ray gives its workers low priority (15), and engines would starve beside any ordinary work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # "local", or Ray would join whatever cluster it finds on this machine.
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
