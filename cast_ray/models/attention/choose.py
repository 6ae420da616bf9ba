"""Which attention backend an engine uses, and why: FlashInfer where it can run and is right, else SDPA.

Before FlashInfer is used, it attends small trees and a prompt on the device, in layers of the models' kinds, and its
answer is held against SDPA's. That also compiles its kernels: a minute or so where they are not in its cache yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from cast_ray.errors import ConfigError, describe
from cast_ray.models.attention.base import AttentionBackend, Group, Layer
from cast_ray.models.attention.flashinfer import FlashInferBackend
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.kv_cache import KVCache

Wanted = Literal["auto", "flashinfer", "sdpa"]
INSTALL = "pip install 'cast-ray[gpu]'"
HEAD_DIMS = (64, 128, 256)  # widths that its kernels are made and tested for
LEAST_CAPABILITY = (8, 0)
# Largest difference from SDPA of one attention over values of about 1: some units in the last place of bfloat16.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Heads:
    """How the layers of a model attend. window: of some of them; softcap: of all."""

    query: int
    kv: int
    dim: int
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Choice:
    """name: `flashinfer` or `sdpa`; reason: why this one, a clause for people."""

    backend: AttentionBackend
    name: str
    reason: str


def choose_backend(
    wanted: Wanted, page_size: int, device: torch.device, dtype: torch.dtype, heads: Iterable[Heads]
) -> Choice:
    """The backend for models of these heads. ConfigError where FlashInfer is asked for by name and cannot be used."""
    heads = tuple(dict.fromkeys(heads))
    if wanted == "sdpa":
        return Choice(SdpaBackend(page_size), "sdpa", "asked for")
    problem = what_hinders(device, dtype, heads)
    if problem is None:
        kernels, problem = _load()
        if kernels is not None:
            backend = FlashInferBackend(page_size, device, kernels)
            problem = fault_of(backend, page_size, device, dtype, heads)
            if problem is None:
                reason = "asked for" if wanted == "flashinfer" else "CUDA, 16 bits"
                split = FlashInferBackend(page_size, device, kernels, split_from=0)
                if fault := fault_of(split, page_size, device, dtype, heads):
                    backend.split_from = None
                    reason += f"; long contexts are not split off: {fault}"
                return Choice(backend, "flashinfer", reason)
    assert problem is not None
    if wanted == "flashinfer":
        remedy = "Use attention=auto, which takes SDPA then"
        raise ConfigError(describe("attention", wanted, f"cannot be used: {problem}", remedy))
    return Choice(SdpaBackend(page_size), "sdpa", problem)


def what_hinders(device: torch.device, dtype: torch.dtype | None, heads: Iterable[Heads] = ()) -> str | None:
    """Why FlashInfer cannot be used here, found without importing it; None where nothing is in its way.

    dtype: None leaves it out of the question.
    """
    if device.type != "cuda":
        return f"FlashInfer runs on CUDA, and the device is {device}"
    if dtype not in (torch.bfloat16, torch.float16, None):
        return f"FlashInfer has no kernels for {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"FlashInfer needs compute capability {needed}, and {device} has {found}"
    for head in heads:
        if head.dim not in HEAD_DIMS:
            return f"FlashInfer has no kernels for heads of width {head.dim}, only {', '.join(map(str, HEAD_DIMS))}"
    if importlib.util.find_spec("flashinfer") is None:
        return f"FlashInfer is not installed ({INSTALL})"
    if not can_compile():
        return "FlashInfer compiles its kernels, and neither nvcc nor the package flashinfer-jit-cache is here"
    return None


def can_compile() -> bool:
    """Whether FlashInfer's kernels can be had: by a CUDA compiler, or compiled ahead."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None or shutil.which("nvcc"):
        return True
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return any((Path(home) / "bin" / "nvcc").exists() for home in homes if home)


def fault_of(
    backend: AttentionBackend, page_size: int, device: torch.device, dtype: torch.dtype, heads: Iterable[Heads]
) -> str | None:
    """What is wrong with a backend's attention in layers of each of these kinds; None where it is right.

    Whatever it raises is a fault too: compilers and drivers have many errors.
    """
    reference = SdpaBackend(page_size)
    for head in heads:
        try:
            apart = max(
                _difference(backend, reference, page_size, device, dtype, head, window)
                for window in {None, head.window}
            )
        except Exception as error:
            detail = " ".join(str(error).split())[:300]
            return f"FlashInfer failed on {device} ({type(error).__name__}: {detail})"
        if not apart <= TOLERANCE:
            return f"FlashInfer's attention differs from PyTorch's by {apart:.3g} on {device}"
    return None


@torch.inference_mode()
def _difference(
    backend: AttentionBackend,
    reference: AttentionBackend,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    head: Heads,
    window: int | None,
) -> float:
    """Greatest distance between two backends' answers: trees behind contexts of unlike length, and a prompt's end."""
    contexts, pages = [2 * page_size + 1, 1], 4
    cache = KVCache(1, head.kv, head.dim, slots=3 * pages * page_size, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    queries = torch.randn(11, head.query, head.dim, generator=generator).to(device, dtype)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=device).expand(2, 3, 3)
    tables = torch.arange(3 * pages, device=device).view(3, pages)
    positions = torch.tensor(contexts, device=device)[:, None] + torch.tensor([0, 1, 1], device=device)
    groups = [
        Group(0, [3, 3], contexts, tables[:2], positions, mask),
        Group(6, [5], [page_size], tables[2:], page_size + torch.arange(5, device=device)[None]),
    ]
    layer = Layer(0, head.dim**-0.5, window=window, softcap=head.softcap)
    answers = [one.run(one.plan(groups, cache), queries, layer).float() for one in (backend, reference)]
    return float((answers[0] - answers[1]).abs().max())


def _load() -> tuple[ModuleType | None, str | None]:
    """The package, or why it cannot be imported. Its own imports raise errors of many kinds."""
    try:
        return importlib.import_module("flashinfer"), None
    except Exception as error:
        detail = " ".join(str(error).split())[:200]
        return None, f"FlashInfer cannot be imported ({type(error).__name__}: {detail})"
