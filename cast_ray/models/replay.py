"""A function of fixed shapes, recorded once and replayed: by a CUDA graph, and on other devices by calling it again.

The second is no faster. It keeps to the rules of the first, so that all that is captured can be tested on a CPU: the
function runs under `graph_safety`, reads inputs that lie where they lay, and its outputs are written over by every
replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from cast_ray.errors import EngineError, describe
from cast_ray.models.graph_safety import Watch

Outputs = tuple[Tensor, ...]
# Runs before a capture: libraries choose and load their kernels in the first ones.
WARM_UPS = 2


class Replay(Protocol):
    """One recording. `outputs` stay where they are; their content is that of the last replay."""

    def capture(self, function: Callable[[], Outputs]) -> Outputs:
        """Record `function`, which reads tensors that the caller keeps and goes on writing to. Once."""
        ...

    def replay(self) -> None:
        """Run it again over what those tensors hold now."""
        ...


class HostReplay:
    """See the module. EngineError where the function does what a captured region must not do."""

    def capture(self, function: Callable[[], Outputs]) -> Outputs:
        for _ in range(WARM_UPS):
            function()
        with Watch(strict=True) as watch:
            outputs = function()
        if left := watch.survivors(outputs):
            problem = f"results of {', '.join(sorted(set(left)))} outlive it, and hold memory of the recording"
            raise EngineError(describe("captured region", len(left), problem, "Return them, or let them go"))
        self._function, self._outputs = function, outputs
        return outputs

    def replay(self) -> None:
        with torch.inference_mode():
            for output, new in zip(self._outputs, self._function(), strict=True):
                if output.data_ptr() != new.data_ptr():
                    output.copy_(new)


class CudaReplay:
    """A CUDA graph. pool: a `torch.cuda.graph_pool_handle`, memory shared by graphs that never run at the same time."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Outputs]) -> Outputs:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                function()
        here.wait_stream(aside)
        # Other threads of the process may use the device meanwhile: only what this one does is recorded or refused.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self._graph.replay()


def replays(device: torch.device) -> Callable[[], Replay]:
    """What makes the recordings of one device, all over one pool of memory."""
    if device.type != "cuda":
        return HostReplay
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
    return lambda: CudaReplay(pool)
