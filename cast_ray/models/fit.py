"""Whether a target's weights fit into what memory a device has free, known from their files' headers before loading."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cast_ray.errors import ModelError, describe

# Formats of safetensors that are cast to the dtype asked for; packed and 8-bit weights keep their own size.
CAST = {"F64", "F32", "F16", "BF16"}
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def check_fits(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """ModelError with the numbers where the weights in `folder`, as `dtype`, are more than the device has free."""
    needed, free = weight_bytes(folder, dtype), free_memory(device)
    if free is None or needed <= free:
        return
    kind = str(dtype).removeprefix("torch.")
    total = f" of {gigabytes(total_memory(device))}" if device.type == "cuda" else ""
    problem = f"its weights take {gigabytes(needed)} in {kind}, and {device} has {gigabytes(free)} free{total}"
    remedy = "Free some, use a larger device, a smaller or quantised model" + (
        ", or dtype=bfloat16" if dtype == torch.float32 else ""
    )
    raise ModelError(describe("target", name, problem, remedy))


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of the safetensors files of a folder once their floating-point tensors are `dtype`."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    about = tensors.get_slice(key)
                    kind = about.get_dtype()
                    size = dtype.itemsize if kind in CAST else BYTES.get(kind, 1)
                    total += size * torch.Size(about.get_shape()).numel()
        except (OSError, SafetensorError):
            continue  # loading says what is wrong with it
    return total


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device now; None where nobody knows."""
    if device.type == "cuda":
        # What PyTorch keeps for itself and does not use can be had as well.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return None


def total_memory(device: torch.device) -> int:
    """Bytes that a CUDA device has, free or not."""
    return torch.cuda.mem_get_info(device)[1]


def gigabytes(count: int) -> str:
    """Bytes as `16.4 GB`, or `35 MB` below one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
