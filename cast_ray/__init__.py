"""cast_ray: lossless batch generation on Ray with CAST tree decoding."""

from cast_ray.config import EngineConfig
from cast_ray.engine.engine import Engine
from cast_ray.request import Completion, RequestStats, SamplingParams

__version__ = "0.1.0"
__all__ = ["Completion", "Engine", "EngineConfig", "RequestStats", "SamplingParams", "__version__"]
