"""What this machine has: processors, memory, GPUs, and the versions of what is installed. Changes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import cast_ray
from cast_ray.calibration.profile import device_name
from cast_ray.models.fit import free_memory

# Distributions whose versions are told, and the modules that are tried: a package may be installed and broken.
NEEDED = {"torch": "torch", "transformers": "transformers", "ray": "ray", "pyarrow": "pyarrow", "numpy": "numpy"}
NEEDED |= {"safetensors": "safetensors", "gguf": "gguf", "llguidance": "llguidance", "pydantic": "pydantic"}
USEFUL = {"flashinfer-python": "flashinfer", "triton": "triton", "numba": "numba", "matplotlib": "matplotlib"}
USEFUL |= {"accelerate": "accelerate"}
SHARED = Path("/dev/shm")


def machine() -> dict[str, Any]:
    """Plain values; sizes in bytes, None where nobody knows."""
    return {
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cpu": device_name(torch.device("cpu")),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory": _total_memory(),
        "memory_free": free_memory(torch.device("cpu")),
        "shared_memory": shutil.disk_usage(SHARED).total if SHARED.is_dir() else None,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


def versions() -> dict[str, str | None]:
    """Of Python, this package and the libraries; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cast_ray": cast_ray.__version__}
    for name in (*NEEDED, *USEFUL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "cuda (PyTorch's)": torch.version.cuda}


def import_fault(module: str) -> str | None:
    """What importing a module raises, in a line; None where it works."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_nvidia() -> bool:
    """Whether there are signs of an NVIDIA driver, whatever PyTorch sees."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _gpu(index: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    return {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory": about.total_memory,
        "memory_free": torch.cuda.mem_get_info(index)[0],
    }


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
