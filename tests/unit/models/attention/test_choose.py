"""Which backend is chosen, and why: on this CPU, on devices that FlashInfer cannot run on, and where it is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cast_ray.errors import ConfigError
from cast_ray.models.attention import choose
from cast_ray.models.attention.choose import Heads, choose_backend, fault_of, what_hinders
from cast_ray.models.attention.flashinfer import FlashInferBackend
from cast_ray.models.attention.sdpa import SdpaBackend
from tests.unit.models.attention import interpreter

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QWEN3 = Heads(32, 8, 128)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the questions go that are asked before anything runs: a GPU, FlashInfer, and a compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())


def test_a_cpu_takes_sdpa_and_says_why() -> None:
    choice = choose_backend("auto", 16, CPU, torch.float32, [QWEN3])
    assert isinstance(choice.backend, SdpaBackend)
    assert (choice.name, choice.reason) == ("sdpa", "FlashInfer runs on CUDA, and the device is cpu")
    assert choose_backend("sdpa", 16, CPU, torch.float32, [QWEN3]).reason == "asked for"


def test_asking_for_flashinfer_where_it_cannot_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"attention='flashinfer'.*runs on CUDA.*attention=auto"):
        choose_backend("flashinfer", 16, CPU, torch.float32, [QWEN3])


@pytest.mark.usefixtures("hopper")
def test_what_hinders_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert what_hinders(CUDA, torch.bfloat16, [QWEN3]) is None
    assert what_hinders(CUDA, torch.float16, [Heads(16, 4, 256), Heads(9, 3, 64)]) is None
    assert "no kernels for float32" in str(what_hinders(CUDA, torch.float32, [QWEN3]))
    assert "heads of width 96" in str(what_hinders(CUDA, torch.bfloat16, [QWEN3, Heads(4, 4, 96)]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0, and cuda:0 has 7.5" in str(what_hinders(CUDA, torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'cast-ray[gpu]'" in str(what_hinders(CUDA, torch.bfloat16))
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object() if name == "flashinfer" else None)
    monkeypatch.setattr(choose.shutil, "which", lambda name: None)
    monkeypatch.setattr(choose.Path, "exists", lambda path: False)
    assert "nvcc" in str(what_hinders(CUDA, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_are_right_pass_the_trial(dtype: torch.dtype) -> None:
    for split_from in (None, 0):
        backend = FlashInferBackend(4, CPU, interpreter, split_from=split_from)
        assert fault_of(backend, 4, CPU, dtype, [Heads(4, 2, 64, window=3), Heads(3, 1, 128, softcap=2.0)]) is None


class Unmasked(interpreter.BatchPrefillWithPagedKVCacheWrapper):
    """Kernels that let every node see every other."""

    def _mask(self, request: int, rows: int, keys: int) -> torch.Tensor:
        return torch.ones(rows, keys, dtype=torch.bool)


class Windowless(interpreter.BatchPrefillWithPagedKVCacheWrapper):
    """Kernels that forget the window of prompts."""

    def _mask(self, request: int, rows: int, keys: int) -> torch.Tensor:
        self.window_left = -1
        return super()._mask(request, rows, keys)


class Broken(interpreter.BatchPrefillWithPagedKVCacheWrapper):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("ninja: build\nstopped")


@pytest.mark.parametrize(
    ("wrapper", "fault"),
    [(Unmasked, "differs from PyTorch's"), (Windowless, "differs from PyTorch's"), (Broken, "ninja: build stop")],
)
def test_kernels_that_are_wrong_or_do_not_compile_do_not(wrapper: Any, fault: str) -> None:
    backend = FlashInferBackend(4, CPU, SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper))
    assert fault in str(fault_of(backend, 4, CPU, torch.bfloat16, [Heads(4, 2, 64, window=3)]))


def test_what_passes_the_trial_is_used_and_what_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "what_hinders", lambda *_: None)
    monkeypatch.setattr(choose, "_load", lambda: (interpreter, None))
    choice = choose_backend("auto", 4, CPU, torch.bfloat16, [Heads(4, 2, 64)])
    assert isinstance(choice.backend, FlashInferBackend)
    assert choice.name == "flashinfer"
    assert choice.backend.split_from is not None
    unmerged = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=interpreter.BatchPrefillWithPagedKVCacheWrapper)
    monkeypatch.setattr(choose, "_load", lambda: (unmerged, None))
    choice = choose_backend("auto", 4, CPU, torch.bfloat16, [Heads(4, 2, 64)])
    assert isinstance(choice.backend, FlashInferBackend)
    assert choice.backend.split_from is None
    assert "merge_state_in_place" in choice.reason
    wrong = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Unmasked)
    monkeypatch.setattr(choose, "_load", lambda: (wrong, None))
    choice = choose_backend("auto", 4, CPU, torch.bfloat16, [Heads(4, 2, 64)])
    assert choice.name == "sdpa"
    assert "differs" in choice.reason
    with pytest.raises(ConfigError, match="differs"):
        choose_backend("flashinfer", 4, CPU, torch.bfloat16, [Heads(4, 2, 64)])
