"""The other order of multiplying gives the same numbers for every shape, and leaves modules as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cast_ray.models import linear
from tests.support import qwen3, save_tiny_model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 7), (2, 7), (3, 7), (8, 7), (9, 7), (2, 3, 7), (1, 1, 7), (4, 5, 7), (0, 7), (1, 0, 7)]
)
def test_outputs_are_those_of_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(7, 11, bias=bias)
    fast = linear.FewRowsLinear(7, 11, bias=bias)
    fast.load_state_dict(plain.state_dict())
    rows = torch.randn(shape)
    out = fast(rows)
    torch.testing.assert_close(out, plain(rows), atol=1e-6, rtol=1e-5)
    assert out.is_contiguous()
    # A view that is not contiguous, as transposed heads are.
    odd = torch.randn(*shape[:-1], 14)[..., ::2]
    torch.testing.assert_close(fast(odd), plain(odd), atol=1e-6, rtol=1e-5)


def test_a_models_layers_are_exchanged_where_it_pays_and_share_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path, qwen3(tie_word_embeddings=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[1, 5, 3]])
    before = model(ids).logits
    names = list(model.state_dict())
    monkeypatch.setattr(linear, "_pays", lambda weight: False)
    assert linear.speed_up_linears(model) == 0
    monkeypatch.setattr(linear, "_pays", lambda weight: True)
    assert linear.speed_up_linears(model) == 3 * 7 + 1
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_dtypes_keep_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_pays", lambda weight: True)
    assert linear.speed_up_linears(nn.Sequential(nn.Linear(4, 4)).bfloat16()) == 0
    assert linear.speed_up_linears(nn.Sequential(nn.ReLU())) == 0
