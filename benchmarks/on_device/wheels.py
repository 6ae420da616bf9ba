"""Packages for a machine without a network: collected here, laid in place there.

The machine is taken to have PyTorch, transformers and what they need. CUDA libraries and FlashInfer's optional
backends, which are large and not used, stay behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

FLASHINFER = "flashinfer-python==0.6.4"
# Distribution -> the module that tells whether it is there already. FlashInfer's imports first, then cast_ray's.
WANTED = {
    FLASHINFER: "flashinfer",
    "apache-tvm-ffi<0.2": "tvm_ffi",
    "einops": "einops",
    "ninja": "ninja",
    "nvidia-ml-py": "pynvml",
    "tabulate": "tabulate",
    "click": "click",
    "requests": "requests",
    "pydantic": "pydantic",
    "pydantic-core": "pydantic_core",
    "annotated-types": "annotated_types",
    "typing-inspection": "typing_inspection",
    "typing-extensions": "typing_extensions",
    "gguf": "gguf",
    "llguidance": "llguidance",
}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
MOST_BYTES = 64 << 20


def prepare(folder: Path, python: str) -> list[Path]:
    """Download the wheels for x86-64 Linux and a version of Python such as `3.12`. Returns them.

    What a package pins of another is followed: pydantic names its one pydantic-core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation", "cp"]
    base += ["--python-version", python, "-d", str(folder)]
    for platform in PLATFORMS:
        base += ["--platform", platform]
    pinned = [name for name in WANTED if name.startswith("pydantic")]
    subprocess.run([*base, "pydantic"], check=True)  # with its dependencies, which are small
    for name in WANTED:
        if name not in pinned:
            subprocess.run([*base, "--no-deps", name], check=True)
    return sorted(folder.glob("*.whl"))


def lay_out(folder: Path) -> list[str]:
    """Unpack those of the folder's wheels that are missing here and put them on the path. Returns their names."""
    missing = [name for name, module in WANTED.items() if importlib.util.find_spec(module) is None]
    wheels = [wheel for name in missing for wheel in folder.glob(f"{_stem(name)}-*.whl")]
    if wheels:
        site = Path(tempfile.gettempdir()) / "device-check-site"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
    return [wheel.name for wheel in wheels]


def _stem(requirement: str) -> str:
    """How a requirement's wheel begins."""
    name = requirement
    for mark in "=<>!~":
        name = name.split(mark)[0]
    return name.replace("-", "_")
