"""cast_ray: lossless batch generation on Ray with CAST tree decoding.

Names are imported when first used: a process that only reads or writes rows need not load PyTorch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cast_ray.batch.pipeline import build_pipeline
    from cast_ray.config import BatchConfig, EngineConfig
    from cast_ray.engine.engine import Engine
    from cast_ray.request import Completion, RequestStats, SamplingParams
    from cast_ray.serve.app import build_app

# OpenMP threads spin for each other at the end of every parallel loop. On a core that another process needs too, the
# one spun for does not run, and a forward takes tens of times as long. Sleeping at once costs a wake-up in every
# product. This many turns bridge the gap between two small products, and no more. It is read when PyTorch is loaded, so
# it stands here, before that.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

__version__ = "0.1.0"
__all__ = [
    "BatchConfig",
    "Completion",
    "Engine",
    "EngineConfig",
    "RequestStats",
    "SamplingParams",
    "build_app",
    "build_pipeline",
]

_HOME = {
    "BatchConfig": "cast_ray.config",
    "Completion": "cast_ray.request",
    "Engine": "cast_ray.engine.engine",
    "EngineConfig": "cast_ray.config",
    "RequestStats": "cast_ray.request",
    "SamplingParams": "cast_ray.request",
    "build_app": "cast_ray.serve.app",
    "build_pipeline": "cast_ray.batch.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cast_ray' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
