"""Packed linear layers give the plain layers' numbers, and a model keeps what others read of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cast_ray.models import linear, native
from cast_ray.models.linear import PackedLinear, can_pack, fits_half, linear_forms, pack_linears
from tests.support import qwen3, save_tiny_model


@pytest.fixture(autouse=True, params=["compiled", "pytorch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test with compiled kernels, and as where there are none."""
    if request.param == "pytorch":
        monkeypatch.setattr(native, "available", lambda: False)
    elif sys.platform != "linux":
        pytest.skip("compiled kernels are for Linux")
    assert native.available() == (request.param == "compiled")
    return native.available()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["half", "float32"])
@pytest.mark.parametrize(
    "shape", [(1, 7), (2, 7), (3, 7), (8, 7), (9, 7), (40, 7), (2, 3, 7), (1, 1, 7), (4, 5, 7), (0, 7), (1, 0, 7)]
)
def test_outputs_are_those_of_the_plain_layer(shape: tuple[int, ...], form: str, bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(7, 11, bias=bias).requires_grad_(False)
    if form == "half":
        plain.weight.copy_(plain.weight.half())
    packed = PackedLinear([plain.weight], [plain.bias], keep=False, exact=True)
    assert packed.form == ("native-float32" if compiled else form)
    rows = torch.randn(shape)
    torch.testing.assert_close(packed(rows), plain(rows), atol=1e-6, rtol=1e-5)
    # A view that is not contiguous, as transposed heads are.
    odd = torch.randn(*shape[:-1], 14)[..., ::2]
    torch.testing.assert_close(packed(odd), plain(odd), atol=1e-6, rtol=1e-5)


def test_several_layers_of_one_input_are_one_product() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 4), nn.Linear(6, 2, bias=False), nn.Linear(6, 3)]
    packed = PackedLinear([layer.weight for layer in layers], [layer.bias for layer in layers], keep=False, exact=True)
    rows = torch.randn(5, 6)
    torch.testing.assert_close(packed(rows), torch.cat([layer(rows) for layer in layers], dim=-1))


def test_weights_are_halved_only_where_that_loses_nothing(compiled: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 64) * 0.02
    assert not fits_half(weight)
    assert fits_half(weight.bfloat16().float())
    assert not fits_half(weight.bfloat16().float() * 2.0**24)  # beyond half precision's range
    assert not fits_half(weight.bfloat16().float() * 2.0**-20)  # and below it
    if not compiled:
        assert PackedLinear([weight], [None], keep=False, exact=True).form == "float32"
        assert PackedLinear([weight], [None], keep=False, exact=False).form == "half"


def test_a_models_layers_are_exchanged_and_its_head_stays_tied(tmp_path: Path, compiled: bool) -> None:
    folder = save_tiny_model(tmp_path, qwen3(tie_word_embeddings=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    ids = torch.tensor([[1, 5, 3]])
    before = model(ids).logits
    assert linear_forms(model) == ["plain"]
    assert pack_linears(model, keep=model.get_output_embeddings()) == 3 * 7 + 1
    assert linear_forms(model) == ["native-float32" if compiled else "float32"]
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any("proj" in name for name, _ in model.named_parameters()), "the plain weights are still held"


def test_models_that_packing_does_not_serve_keep_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(nn.Sequential(nn.ReLU()))
    assert not can_pack(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()))
    bfloat16 = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    monkeypatch.setattr(linear, "computes_in_bfloat16", lambda device: False)
    assert can_pack(bfloat16)
    monkeypatch.setattr(linear, "computes_in_bfloat16", lambda device: True)
    assert not can_pack(bfloat16)
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(linear, "_has_kernels", lambda: False)
    assert pack_linears(nn.Sequential(nn.Linear(4, 4))) == 0
