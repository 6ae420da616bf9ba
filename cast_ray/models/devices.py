"""Where a model runs and in what dtype, from the settings' words. It loads nothing."""

from __future__ import annotations

import re

import torch

from cast_ray.errors import ConfigError, describe


def resolve_device(name: str) -> torch.device:
    """`auto` (CUDA where there is one, else the CPU), `cpu`, `cuda` or `cuda:I` as a device. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(describe("device", name, "is no device", "Use auto, cpu, cuda or cuda:I"))
    if not torch.cuda.is_available():
        remedy = f"Use device=cpu, or a PyTorch built for CUDA (this is {torch.__version__}) on a machine with a GPU"
        raise ConfigError(describe("device", name, "PyTorch sees no CUDA device", remedy))
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(describe("device", name, "no such CUDA device", f"This process sees {count}, counted from 0"))
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype by its name, or `auto`: bfloat16 where the device computes in it, else float32. Raises ConfigError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if computes_in_bfloat16(device) else torch.float32
    if name not in known:
        raise ConfigError(describe("dtype", name, "is no dtype of the engine", f"Use auto, {', '.join(known)}"))
    return known[name]


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are the device's own; elsewhere PyTorch emulates them, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "cpu":
        # PyTorch keeps these private, so a release may drop one: then float32, which is right everywhere.
        probes = [getattr(torch.cpu, f"_is_{feature}_supported", None) for feature in ("avx512_bf16", "amx_tile")]
        return any(bool(probe()) for probe in probes if probe is not None)
    return False
