"""What a target's weights take, from their files, and the refusal where that is more than there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cast_ray.errors import ModelError
from cast_ray.models import fit
from cast_ray.models.loading import load_target
from tests.support import qwen3, save_tiny_model

CPU = torch.device("cpu")


def test_weights_count_in_the_dtype_that_they_are_loaded_in(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, qwen3())
    model = load_target(str(tmp_path), torch.float32, CPU).model
    count = sum(parameter.numel() for parameter in model.parameters())
    assert fit.weight_bytes(tmp_path, torch.float32) == 4 * count
    assert fit.weight_bytes(tmp_path, torch.bfloat16) == 2 * count


def test_quantised_weights_keep_their_size(tmp_path: Path) -> None:
    save_file(
        {
            "packed": torch.zeros(10, 3, dtype=torch.uint8),
            "eight": torch.zeros(7, dtype=torch.float8_e4m3fn),
            "scale": torch.zeros(5, dtype=torch.float32),
            "zeros": torch.zeros(2, dtype=torch.int32),
        },
        tmp_path / "model.safetensors",
    )
    assert fit.weight_bytes(tmp_path, torch.bfloat16) == 30 + 7 + 5 * 2 + 2 * 4


def test_a_target_that_does_not_fit_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, qwen3())
    needed = fit.weight_bytes(tmp_path, torch.float32)
    monkeypatch.setattr(fit, "free_memory", lambda device: needed - 1)
    with pytest.raises(ModelError, match=r"weights take \d+ MB in float32, and cpu has.*bfloat16"):
        load_target(str(tmp_path), torch.float32, CPU)
    load_target(str(tmp_path), torch.bfloat16, CPU)


def test_sizes_are_said_in_units_that_people_read() -> None:
    assert fit.gigabytes(16_400_000_000) == "16.4 GB"
    assert fit.gigabytes(35_400_000) == "35 MB"


def test_a_cpu_says_what_it_has_free() -> None:
    free = fit.free_memory(CPU)
    assert free is not None
    assert free > 1 << 20
