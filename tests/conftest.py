"""What tests share: a local Ray cluster for those that ask for one, ended with the session."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import cast_ray  # noqa: F401 - before any test imports PyTorch: it says how long OpenMP threads spin


@pytest.fixture
def ray_cluster(_ray_ends: None) -> None:
    """A local cluster of two CPUs; jobs run in this process join it.

    Tests that serve end whatever cluster runs and start their own, so this one is started anew where none is left.
    """
    import ray

    import tests.fake_engine as fake_engine

    if ray.is_initialized():
        return
    # Workers have no tests folder on their path.
    ray.cloudpickle.register_pickle_by_value(fake_engine)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


@pytest.fixture(scope="session")
def _ray_ends() -> Iterator[None]:
    yield
    import ray

    ray.shutdown()
