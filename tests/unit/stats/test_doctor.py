"""`cast-ray doctor`: it runs anywhere, says what engines would use and why, and every lack comes with its remedy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cast_ray.cli import app
from cast_ray.config import EngineConfig
from cast_ray.stats import doctor, machine
from cast_ray.stats.doctor import Check, examine, uses


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAST_RAY_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_it_prints_and_exits_with_0_without_a_gpu() -> None:
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    for word in ("This machine", "Engines use", "Checks", "sdpa", torch.__version__):
        assert word in shown.output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--device", "cuda", "--attention", "sdpa"]).output)
    assert found["uses"]["device"]["value"] == "none"
    assert "PyTorch sees no CUDA device" in found["uses"]["device"]["why"]
    assert {check["state"] for check in found["checks"]} <= {"ok", "note", "problem"}
    assert found["machine"]["gpus"] == []
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_it_says_what_engines_would_use_and_why() -> None:
    found = uses(EngineConfig(device="cpu", dtype="float32"))
    assert (found["dtype"].value, found["dtype"].why) == ("float32", "asked for")
    assert found["attention"].value == "sdpa"
    assert "FlashInfer runs on CUDA" in found["attention"].why
    assert uses(EngineConfig(attention="sdpa"))["attention"].why == "asked for"
    assert uses(EngineConfig(attention="flashinfer"))["attention"].value == "none"


def test_a_gpu_without_flashinfer_is_told_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    about = SimpleNamespace(name="H", major=9, minor=0, multi_processor_count=132, total_memory=150 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 << 30, 150 << 30))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = examine(EngineConfig())
    assert found.uses["device"].value == "cuda:0"
    assert found.uses["dtype"].value == "bfloat16"
    assert found.uses["attention"].value == "sdpa"
    assert found.uses["graphs"].value == "CUDA graphs"
    assert named(found.checks, "attention kernels").remedy == "pip install 'cast-ray[gpu]'"
    assert found.machine["gpus"][0]["capability"] == "9.0"


def test_a_driver_that_pytorch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "has_nvidia", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    check = named(examine(EngineConfig(device="cpu")).checks, "GPU")
    assert check.state == "problem"
    assert "built for CUDA" in check.remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in named(examine(EngineConfig(device="cpu")).checks, "GPU").remedy


def test_a_library_that_cannot_be_imported_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise OSError('its shared object is gone')")
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.import_fault("broken_library") == "OSError: its shared object is gone"
    monkeypatch.setattr(doctor, "NEEDED", {"broken-library": "broken_library"})
    check = named(examine(EngineConfig(device="cpu")).checks, "libraries")
    assert (check.state, check.remedy) == ("problem", "pip install --upgrade broken-library")


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAST_RAY_HOME", str(tmp_path / "file" / "cache"))
    check = named(examine(EngineConfig(device="cpu")).checks, "cache")
    assert check.state == "problem"
    assert "CAST_RAY_HOME" in check.remedy


def test_saved_profiles_are_named(cache: Path) -> None:
    assert named(examine(EngineConfig(device="cpu")).checks, "profiles").remedy == "cast-ray calibrate"
    key: dict[str, Any] = {"target": {"name": "org/model"}, "device": "a chip", "dtype": "bfloat16"}
    (cache / "profiles").mkdir()
    (cache / "profiles" / "one.json").write_text(json.dumps({"key": key, "complete": True}))
    (cache / "profiles" / "two.json").write_text("{")
    check = named(examine(EngineConfig(device="cpu")).checks, "profiles")
    assert check.state == "ok"
    assert "org/model on a chip bfloat16; two.json (unreadable)" in check.says
    (cache / "profiles" / "three.json").write_text(json.dumps({"key": key, "complete": False}))
    check = named(examine(EngineConfig(device="cpu")).checks, "profiles")
    assert check.state == "note"
    assert "incomplete: three.json" in check.says
    assert "cast-ray calibrate" in check.remedy


def test_what_computes_on_a_cpu_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", dtype="float32")
    monkeypatch.delenv("CAST_RAY_NATIVE", raising=False)
    monkeypatch.setattr("cast_ray.stats.doctor.import_fault", lambda name: None)
    monkeypatch.setattr("sys.platform", "linux")
    assert uses(config)["kernels"].value == "compiled"
    monkeypatch.setattr("cast_ray.stats.doctor.import_fault", lambda name: "not installed")
    assert uses(config)["kernels"].value == "PyTorch's"
    assert "pip install numba" in uses(config)["kernels"].why
    monkeypatch.setenv("CAST_RAY_NATIVE", "0")
    assert "CAST_RAY_NATIVE=0" in uses(config)["kernels"].why
