"""The Ray cluster of a command: the one that it is connected to, else the one in RAY_ADDRESS, else a local one; and
what its nodes have."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cast_ray.pool.placement import NodeResources

_BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


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


def cluster_nodes() -> list[NodeResources]:
    """The live nodes of the cluster that this process is connected to."""
    import ray

    alive = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return [
        NodeResources(
            name,
            found.get("CPU", 0.0),
            found.get("GPU", 0.0),
            {key: amount for key, amount in found.items() if key not in _BUILT_IN and not key.startswith("node:")},
        )
        for name, found in alive
    ]
