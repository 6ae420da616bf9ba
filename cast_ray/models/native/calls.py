"""From tensors to compiled calls: a team of threads as large as PyTorch's, and one linear layer as a job for it."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import torch
from torch import Tensor

from cast_ray.models.native import kernels as k
from cast_ray.models.native import team as t
from cast_ray.models.native.forms import TILE, Form, pack
from cast_ray.models.native.products import COLUMNS, PRODUCTS

# Rows of one call; more are done in parts, so that a part's inputs stay in the processor's cache.
MOST_ROWS = 256


class Team:
    """`threads` threads, the caller's among them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._memory = aligned(t.CONTROL_SIZE)
        self._control = self._memory.ctypes.data
        ctypes.CDLL(None).sem_init(ctypes.c_void_p(self._control + 8 * t.SEMAPHORE), 0, 0)
        for thread in range(1, threads):
            threading.Thread(
                target=k.enter, args=(self._control, 0, 0, 0, thread), name=f"cast-ray-native-{thread}", daemon=True
            ).start()

    def run(self, kind: int, job: np.ndarray, phases: int) -> None:
        """One call. When the helpers are busy with another thread's, the caller does this one alone."""
        if self.threads > 1 and self._lock.acquire(blocking=False):
            try:
                k.enter(self._control, kind, job.ctypes.data, phases, 0)
            finally:
                self._lock.release()
        else:
            k.enter(0, kind, job.ctypes.data, phases, 0)


_teams: dict[int, Team] = {}
_local = threading.local()
# A child process has none of its parent's threads.
os.register_at_fork(after_in_child=_teams.clear)


def team() -> Team:
    """The process's team of as many threads as PyTorch uses at present."""
    threads = torch.get_num_threads()
    if threads not in _teams:
        _teams[threads] = Team(threads)
    return _teams[threads]


def aligned(count: int) -> np.ndarray:
    """`count` int64 zeros that begin on a cache line."""
    memory = np.zeros(count + 8, dtype=np.int64)
    start = -memory.ctypes.data % 64 // 8
    return memory[start : start + count]


def room_for(rows: int, widest: int, keys: int = 0) -> int:
    """Bytes of scratch that one thread needs: two tiles of outputs and a tile of weights, or the scores of a block."""
    return max(2 * rows * COLUMNS * 4 + widest * TILE * 4, 4 * keys * 4) + 64


class Scratch:
    """A room a thread, made anew when a larger one is asked for."""

    def __init__(self) -> None:
        self._memory = aligned(1)
        self._shape = (0, 0)

    def fill(self, job: np.ndarray, threads: int, size: int) -> None:
        """Enter rooms of at least `size` bytes into a job."""
        if self._shape[0] < threads or self._shape[1] < size:
            size = -(-size * 5 // 4 // 64) * 64
            self._memory, self._shape = aligned(threads * size // 8), (threads, size)
        job[k.SCRATCH], job[k.SCRATCH_BYTES] = self._memory.ctypes.data, self._shape[1]


class NativeLinear:
    """A packed linear layer. weight: `[out, in]`, any of what `forms.pack` takes; bias `[out]` or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.form, self.bytes = pack(weight)
        self.bias: Tensor | None = None
        if bias is not None:
            padded = -(-self.outputs // COLUMNS) * COLUMNS
            self.bias = torch.zeros(padded)
            self.bias[: self.outputs] = bias.detach()

    def place(self, pair: int = 0) -> tuple[int, int, int]:
        """(product, weight, bias) for a job, from the `pair`-th 32 columns on."""
        step = 2 * self.bytes.shape[1] * self.bytes.shape[2]
        bias = 0 if self.bias is None else self.bias.data_ptr() + 4 * COLUMNS * pair
        return PRODUCTS[self.form], self.bytes.data_ptr() + pair * step, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """`[n, in]` float32 -> `[n, out]`."""
        rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.outputs)
        if not hasattr(_local, "job"):
            _local.job, _local.counters, _local.scratch = aligned(k.PRODUCT_SIZE), aligned(t.PHASE_SIZE), Scratch()
        job, helpers = _local.job, team()
        for start in range(0, rows.shape[0], MOST_ROWS):
            count = min(MOST_ROWS, rows.shape[0] - start)
            _local.scratch.fill(job, helpers.threads, room_for(count, self.inputs))
            job[k.COUNTERS], job[k.ROWS] = _local.counters.ctypes.data, count
            job[k.P_PRODUCT : k.P_BIAS + 1] = self.place()
            job[k.P_IN], job[k.P_OUT] = self.inputs, self.outputs
            job[k.P_FROM] = rows.data_ptr() + start * self.inputs * 4
            job[k.P_TO] = out.data_ptr() + start * self.outputs * 4
            helpers.run(k.PRODUCT, job, 1)
        return out


def form_name(linear: NativeLinear) -> str:
    """What a profile's key calls a packed layer."""
    return f"native-{Form(linear.form).name.lower().replace('_', '-')}"
