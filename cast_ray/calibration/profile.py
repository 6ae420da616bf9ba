"""Latency profiles on disk: JSON, keyed by everything that changes a device's speed, reused where all of it matches.

A profile holds what the probe measured. Files are written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from cast_ray.config import cache_dir
from cast_ray.errors import ConfigError
from cast_ray.width.latency import LatencyTable

FORMAT = 3
# Parts of a key that change while device and models stay: a profile of other versions lies at the same place, so that
# it is found, named and replaced.
VERSIONS = ("format", "python", "torch", "transformers")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """What was measured, and whether that is all the probe has to measure."""

    table: LatencyTable
    complete: bool


def profile_key(
    device: torch.device,
    dtype: torch.dtype,
    target: dict[str, Any],
    drafter: dict[str, Any] | None,
    probe: dict[str, Any],
) -> dict[str, Any]:
    """Everything that a measured latency depends on, and what was to be measured, as plain values."""
    return {
        "format": FORMAT,
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "target": target,
        "drafter": drafter,
        "probe": probe,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def profile_path(key: dict[str, Any], folder: Path | None) -> Path:
    """Where the profile of this key lies."""
    lasting = {name: value for name, value in key.items() if name not in VERSIONS}
    digest = hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()[:16]
    return (folder or cache_dir() / "profiles") / f"{digest}.json"


def load_profile(key: dict[str, Any], folder: Path | None) -> Profile | None:
    """The saved profile, or None when there is none; a damaged, foreign or older one is named in the log."""
    path = profile_path(key, folder)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        here = json.loads(json.dumps(key))
        if saved["key"] != here:
            raise ConfigError(f"it was measured under other conditions ({_differences(saved['key'], here)})")
        return Profile(LatencyTable.from_dict(saved["latency"]), bool(saved["complete"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("profile %s is ignored and measured anew: %s", path, error)
        return None


def save_profile(key: dict[str, Any], profile: Profile, folder: Path | None) -> Path:
    """Write the profile; a folder that cannot be written costs the next start a probe, no more."""
    path = profile_path(key, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            saved = {"key": key, "complete": profile.complete, "latency": profile.table.to_dict()}
            json.dump(saved, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("profile %s could not be saved (%s); the next start measures again", path, error)
    return path


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    names = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
    return "; ".join(f"{name} {saved.get(name)}, here {here.get(name)}" for name in names)


def device_name(device: torch.device) -> str:
    """A name that tells devices of unlike speed apart."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()} x{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
