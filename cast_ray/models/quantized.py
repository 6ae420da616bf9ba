"""Targets whose checkpoint holds quantised weights: what transformers needs to load them, said before it tries.

Their linear layers are those of the package named here, as transformers puts them in; nothing here quantises.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from cast_ray.errors import ModelError, describe


@dataclass(frozen=True)
class Method:
    """What a way of quantising needs. packages: module names. cuda: the least compute capability, None: runs anywhere.

    kernels: packages without which, as without such a device, the weights are turned into plain ones at load; None
    where they cannot be.
    """

    packages: tuple[str, ...]
    cuda: tuple[int, int] | None = None
    kernels: tuple[str, ...] | None = None


METHODS = {
    "awq": Method(("gptqmodel", "accelerate")),
    "bitsandbytes": Method(("bitsandbytes", "accelerate")),
    "compressed-tensors": Method(("compressed_tensors", "accelerate")),
    "fbgemm_fp8": Method(("fbgemm_gpu", "accelerate"), cuda=(9, 0)),
    "fp8": Method(("accelerate",), cuda=(8, 9), kernels=()),
    "gptq": Method(("gptqmodel", "optimum", "accelerate")),
    "hqq": Method(("hqq", "accelerate")),
    "mxfp4": Method((), cuda=(7, 5), kernels=("triton", "kernels", "accelerate")),
    "torchao": Method(("torchao", "accelerate")),
}
PIP_NAMES = {"compressed_tensors": "compressed-tensors", "fbgemm_gpu": "fbgemm-gpu-genai"}


def quantization_of(config: Any) -> str | None:
    """The method that a model's config names, such as `fp8`; None for plain weights."""
    stated = _stated(config)
    if stated is None:
        return None
    method = stated.get("quant_method")
    if method is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        method = "bitsandbytes"  # older checkpoints of it do not say
    return str(getattr(method, "value", method))


def check_quantization(config: Any, name: str, device: torch.device) -> str | None:
    """The method of a target's weights; ModelError where a package or a device that it needs is not here."""
    kind = quantization_of(config)
    if kind is None:
        return None
    method = METHODS.get(kind)
    if method is None:
        problem = f"its weights are quantised by {kind!r}, which was never tried here"
        raise ModelError(describe("target", name, problem, f"Use plain weights, or one of: {', '.join(METHODS)}"))
    if missing := _missing(method.packages):
        names = [PIP_NAMES.get(package, package) for package in missing]
        problem = f"its weights are quantised by {kind}, which needs {' and '.join(names)}"
        raise ModelError(describe("target", name, problem, f"Run `pip install {' '.join(names)}`"))
    if method.kernels is None and not _reaches(device, method.cuda):
        wanted = ".".join(map(str, method.cuda or ()))
        problem = f"its weights are quantised by {kind}, which needs CUDA of compute capability {wanted} or more"
        raise ModelError(describe("target", name, problem, "Use such a device, or a checkpoint with plain weights"))
    return kind


def make_plain(config: Any, kind: str, device: torch.device) -> bool:
    """Have a config's weights turned into plain 16-bit ones at load where nothing here computes with them as they are.

    Returns whether they will be: they then take the memory of plain weights.
    """
    method = METHODS[kind]
    if method.kernels is None or (_reaches(device, method.cuda) and not _missing(method.kernels)):
        return False
    config.quantization_config = {**(_stated(config) or {}), "dequantize": True}
    return True


def _stated(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a model or of its text part, as it stands in config.json."""
    for part in (config, config.get_text_config()):
        stated = getattr(part, "quantization_config", None)
        if stated is not None:
            return dict(stated) if isinstance(stated, dict) else dict(stated.to_dict())
    return None


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]


def _reaches(device: torch.device, capability: tuple[int, int] | None) -> bool:
    if capability is None:
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability
