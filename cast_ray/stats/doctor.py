"""What an engine would use on this machine and why, and what is missing or in the way. Loads no model."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from cast_ray.config import EngineConfig, cache_dir
from cast_ray.errors import CastRayError
from cast_ray.models import native
from cast_ray.models.attention.choose import INSTALL as INSTALL_GPU
from cast_ray.models.attention.choose import can_compile, what_hinders
from cast_ray.models.devices import computes_in_bfloat16, resolve_device, resolve_dtype
from cast_ray.models.embedded import HUB_ID, has_embedded
from cast_ray.models.embedded import INSTALL as INSTALL_EMBEDDED
from cast_ray.models.fit import gigabytes
from cast_ray.stats.machine import NEEDED, SHARED, has_nvidia, import_fault, machine, versions

State = Literal["ok", "note", "problem"]
# The embedded target's converted copy, and profiles.
LEAST_DISK = 2 << 30
# Ray's object store is this share of the memory, in shared memory where that is large enough.
STORE_SHARE = 0.3
# Enough for any device to finish a profile.
UNTIL_COMPLETE = "--probe-seconds 120"


@dataclass(frozen=True)
class Use:
    """One decision: what, and why that."""

    value: str
    why: str


@dataclass(frozen=True)
class Check:
    """state: `problem` where something does not work, `note` where more could be had. remedy: a command or a step."""

    name: str
    state: State
    says: str
    remedy: str = ""


@dataclass(frozen=True)
class Findings:
    """machine, versions: see `stats.machine`. uses: by `device`, `dtype`, `attention`, `graphs`,
    `kernels`."""

    machine: dict[str, Any]
    versions: dict[str, str | None]
    uses: dict[str, Use]
    checks: list[Check]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def examine(config: EngineConfig) -> Findings:
    """Look at this machine with an engine's settings in mind. Raises nothing of what it finds."""
    checks = [*_imports(), _gpu_build(), _kernels(config), _embedded(), _plots(), *_folders(config), _shared_memory()]
    return Findings(machine(), versions(), uses(config), checks)


def uses(config: EngineConfig) -> dict[str, Use]:
    """What an engine of these settings would use."""
    try:
        device = resolve_device(config.device)
    except CastRayError as error:
        return {"device": Use("none", str(error))}
    cuda = device.type == "cuda"
    why = "asked for" if config.device != "auto" else "PyTorch sees CUDA" if cuda else "PyTorch sees no CUDA device"
    dtype = resolve_dtype(config.dtype, device)
    if config.dtype != "auto":
        reason = "asked for"
    elif computes_in_bfloat16(device):
        reason = "the device computes in it"
    else:
        reason = "the device does not compute in bfloat16"
    return {
        "device": Use(str(device), why),
        "dtype": Use(str(dtype).removeprefix("torch."), reason),
        "attention": _attention(config, device, dtype),
        "graphs": _graphs(config, device),
        "kernels": _compiled(device, dtype),
    }


def _attention(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Use:
    if config.attention == "sdpa":
        return Use("sdpa", "asked for")
    problem = what_hinders(device, dtype)
    if problem is None and (fault := import_fault("flashinfer")):
        problem = f"FlashInfer cannot be imported ({fault})"
    if problem is None:
        return Use("flashinfer", "CUDA, 16 bits; its kernels are tried when an engine starts")
    if config.attention == "flashinfer":
        return Use("none", f"attention=flashinfer is asked for, and {problem}")
    return Use("sdpa", problem)


def _graphs(config: EngineConfig, device: torch.device) -> Use:
    if config.graphs == "off":
        return Use("none", "graphs=off is asked for")
    if device.type == "cuda":
        return Use("CUDA graphs", "the device is CUDA" if config.graphs == "auto" else "asked for")
    if config.graphs == "on":
        return Use("recordings that are called again", "graphs=on is asked for, and only CUDA replays")
    return Use("none", "only CUDA has them")


def _compiled(device: torch.device, dtype: torch.dtype) -> Use:
    """What computes a CPU's linear layers, and all of a layer where its shape is known."""
    if device.type != "cpu":
        return Use("PyTorch's", "the device is no CPU")
    if dtype not in (torch.float32, torch.bfloat16) or (dtype == torch.bfloat16 and computes_in_bfloat16(device)):
        return Use("PyTorch's", f"the CPU computes in {str(dtype).removeprefix('torch.')} by itself")
    if os.environ.get(native.SWITCH) == "0":
        return Use("PyTorch's", f"{native.SWITCH}=0 is set")
    if sys.platform != "linux":
        return Use("PyTorch's", "compiled ones are for Linux")
    if fault := import_fault("numba"):
        why = f"numba cannot be imported ({fault}); `pip install numba` makes a CPU several times faster"
        return Use("PyTorch's", why)
    return Use("compiled", f"numba; kept in {cache_dir() / 'native'} after the first start")


def _imports() -> list[Check]:
    faults = {name: fault for name, module in NEEDED.items() if (fault := import_fault(module))}
    if not faults:
        return [Check("libraries", "ok", f"{len(NEEDED)} that are needed can be imported")]
    return [Check("libraries", "problem", f"{n}: {fault}", f"pip install --upgrade {n}") for n, fault in faults.items()]


def _gpu_build() -> Check:
    if torch.cuda.is_available():
        return Check("GPU", "ok", f"PyTorch {torch.__version__} sees {torch.cuda.device_count()}")
    if not has_nvidia():
        return Check("GPU", "note", "none here; engines run on the CPU")
    if torch.version.cuda is None:
        says = f"a driver is here, and PyTorch {torch.__version__} is built without CUDA"
        return Check("GPU", "problem", says, "Install a PyTorch built for CUDA (pytorch.org/get-started)")
    remedy = f"See `nvidia-smi`; the driver must serve CUDA {torch.version.cuda}, and CUDA_VISIBLE_DEVICES not hide it"
    return Check("GPU", "problem", "a driver is here, and PyTorch can use no device of it", remedy)


def _kernels(config: EngineConfig) -> Check:
    """FlashInfer, which is worth its place where there is a GPU."""
    if not torch.cuda.is_available():
        return Check("attention kernels", "ok", "PyTorch's own are used on a CPU; FlashInfer would not run")
    if config.attention == "sdpa":
        return Check("attention kernels", "ok", "PyTorch's own are asked for")
    problem = what_hinders(torch.device("cuda", 0), None)
    if problem is None and (fault := import_fault("flashinfer")):
        return Check("attention kernels", "problem", f"FlashInfer: {fault}", f"{INSTALL_GPU} --force-reinstall")
    if problem is None:
        return Check("attention kernels", "ok", "FlashInfer can be imported, and its kernels be compiled")
    if find_spec("flashinfer") is None:
        remedy = INSTALL_GPU
    else:
        remedy = "" if can_compile() else "Install the CUDA toolkit (nvcc), or flashinfer-jit-cache"
    return Check("attention kernels", "note", problem, remedy)


def _embedded() -> Check:
    if has_embedded():
        return Check("embedded model", "ok", "installed")
    says = f"not installed; target 'embedded' would be fetched as {HUB_ID}"
    return Check("embedded model", "note", says, INSTALL_EMBEDDED)


def _plots() -> Check:
    if fault := import_fault("matplotlib"):
        return Check("plots", "note", f"reports come without ({fault})", "pip install 'cast-ray[report]'")
    return Check("plots", "ok", "matplotlib is here")


def _folders(config: EngineConfig) -> list[Check]:
    folder = cache_dir()
    remedy = "Set CAST_RAY_HOME to a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [Check("cache", "problem", f"{folder} cannot be written ({error.strerror or error})", remedy)]
    says = f"{folder} can be written, {gigabytes(free)} free"
    if free < LEAST_DISK:
        cache = Check("cache", "note", f"{says}: little for models", "Free some disk, or set CAST_RAY_HOME elsewhere")
    else:
        cache = Check("cache", "ok", says)
    return [cache, _profiles(config.profile_dir or folder / "profiles")]


def _profiles(folder: Path) -> Check:
    """Latency profiles that engines of the same device and models would find, and which hold only a part."""
    found, partial = [], 0
    for file in sorted(folder.glob("*.json")):
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            key, complete = saved["key"], bool(saved["complete"])
            partial += not complete
            name = f"{key['target']['name']} on {key['device']} {key['dtype']}"
            found.append(name if complete else f"{name} (incomplete: {file.name})")
        except (OSError, ValueError, KeyError, TypeError):
            found.append(f"{file.name} (unreadable)")
    if not found:
        return Check("profiles", "note", f"none in {folder}: an engine's first start measures", "cast-ray calibrate")
    says = f"{len(found)} in {folder}: {'; '.join(dict.fromkeys(found))}"
    if partial:
        remedy = (
            f"cast-ray calibrate {UNTIL_COMPLETE} with the target, drafter and settings of the job goes on measuring"
        )
        return Check("profiles", "note", f"{says}. The probe had no time for all of {partial}", remedy)
    return Check("profiles", "ok", says)


def _shared_memory() -> Check:
    if not SHARED.is_dir():
        return Check("shared memory", "note", f"no {SHARED}: Ray keeps its objects on the disk")
    size = shutil.disk_usage(SHARED).total
    memory = machine()["memory"] or 0
    says = f"{SHARED} has {gigabytes(size)}"
    if size < STORE_SHARE * memory:
        wanted = gigabytes(int(STORE_SHARE * memory))
        return Check("shared memory", "note", f"{says}; Ray likes {wanted}", "In Docker, run with --shm-size")
    return Check("shared memory", "ok", says)
