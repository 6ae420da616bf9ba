"""Quantised checkpoints: what is missing to load them is named; what can be turned into plain weights here is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig

from cast_ray.models import quantized
from cast_ray.models.loading import load_target
from cast_ray.models.quantized import METHODS, check_quantization, make_plain, quantization_of
from tests import families
from tests.checkpoints import CPU, edit_config, refused, write_folder, write_tokenizer

pytestmark = pytest.mark.usefixtures("own_caches")
# The sixteen numbers of a 4-bit float (OCP Microscaling Formats 1.0, E2M1), by their bits.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", "pip install bitsandbytes")),
        ({"load_in_8bit": True}, ("bitsandbytes",)),
        ({"quant_method": "gptq", "bits": 4}, ("gptqmodel and optimum", "pip install gptqmodel optimum")),
        ({"quant_method": "awq", "bits": 4}, ("gptqmodel",)),
        ({"quant_method": "compressed-tensors"}, ("pip install compressed-tensors",)),
        ({"quant_method": "fp8"}, ("pip install accelerate",)),
        ({"quant_method": "vptq"}, ("'vptq'", "never tried", "plain weights", "bitsandbytes")),
    ],
)
def test_what_a_quantised_checkpoint_needs_is_named_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"not read")
    edit_config(folder, quantization_config=method)
    refused(folder, *words)


def test_a_device_that_a_method_cannot_do_without_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: object())
    folder = write_folder(tmp_path / "m")
    edit_config(folder, quantization_config={"quant_method": "fbgemm_fp8"})
    refused(folder, "fbgemm_fp8", "CUDA of compute capability 9.0", "plain weights")


def test_a_device_that_computes_with_the_weights_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(quantized, "find_spec", lambda name: object())
    cuda = torch.device("cuda", 0)
    for kind in METHODS:
        config = LlamaConfig(quantization_config={"quant_method": kind})
        assert quantization_of(config) == check_quantization(config, "m", cuda) == kind
        assert not make_plain(config, kind, cuda)
        assert make_plain(config, kind, CPU) == (kind in ("fp8", "mxfp4"))
    assert check_quantization(LlamaConfig(), "m", cuda) is None


def test_four_bit_weights_of_gpt_oss_become_plain_ones_of_the_same_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = GptOssConfig(**{**families.TINY, **families.LOCAL_EXPERTS, "vocab_size": 262, "intermediate_size": 32})
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = weights.pop(name).shape
        # As published: blocks of 32 values along the input, two to a byte, with an exponent each.
        codes = torch.randint(16, (experts, columns, rows // 32, 32), dtype=torch.uint8)
        exponents = torch.randint(124, 130, (experts, columns, rows // 32), dtype=torch.uint8)
        weights[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        weights[f"{name}_scales"] = exponents
        values = FP4[codes.long()] * 2.0 ** (exponents.float() - 127)[..., None]
        expected[name] = values.flatten(2).mT
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert "dequantize" not in json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    with caplog.at_level(logging.WARNING):
        loaded = load_target(str(tmp_path), torch.float32, CPU)
    assert "its mxfp4 weights become plain torch.float32 ones" in caplog.text
    state = loaded.model.state_dict()
    assert expected
    for name, values in expected.items():
        assert torch.equal(state[name].float(), values)
