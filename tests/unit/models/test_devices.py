"""Devices and dtypes by the settings' words."""

from __future__ import annotations

import pytest
import torch

from cast_ray.errors import ConfigError
from cast_ray.models.devices import resolve_device, resolve_dtype
from tests.checkpoints import (
    CPU,
)


def test_devices_resolve_to_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device='cuda': PyTorch sees no CUDA device\. Use device=cpu"):
        resolve_device("cuda")
    for name in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(ConfigError, match="is no device"):
            resolve_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="sees 2"):
        resolve_device("cuda:2")


def test_auto_dtype_is_bfloat16_only_where_the_device_computes_in_it(monkeypatch):
    for capability, expected in (((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, seen=capability: seen)
        assert resolve_dtype("auto", torch.device("cuda", 0)) == expected
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    for supported, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda seen=supported: seen, raising=False)
        assert resolve_dtype("auto", CPU) == expected
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='int8'"):
        resolve_dtype("int8", CPU)
