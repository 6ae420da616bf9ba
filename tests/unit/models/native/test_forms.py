"""Weights take the fewest bits that hold them exactly, and compiled products give them back bit by bit."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from cast_ray.models import native

if sys.platform != "linux":
    pytest.skip("compiled kernels are for Linux", allow_module_level=True)
assert native.available(), "numba is a dependency, so a failure to compile is one"

from cast_ray.models.native.calls import NativeLinear  # noqa: E402
from cast_ray.models.native.forms import Form, pack  # noqa: E402

OUT, IN = 40, 96


def scales(low: float, high: float) -> Tensor:
    return (torch.rand(OUT, IN // 32) * (high - low) + low).half().float()[..., None]


def q4_0() -> Tensor:
    codes = torch.randint(-8, 8, (OUT, IN // 32, 32))
    codes[..., 3] = -8  # the quantiser scales the value farthest out to this
    return codes * scales(-0.02, 0.02)


def q4_1() -> Tensor:
    codes = torch.randint(0, 16, (OUT, IN // 32, 32))
    codes[..., 5], codes[..., 20] = 0, 15
    return codes * scales(0.001, 0.02) + scales(-0.2, 0.1)


def q8_0() -> Tensor:
    codes = torch.randint(-127, 128, (OUT, IN // 32, 32))
    codes[..., 31] = 127
    return codes * scales(0.0001, 0.002)


WEIGHTS = {
    "q4_0": (q4_0, Form.FOUR_BITS),
    "q4_1": (q4_1, Form.FOUR_BITS),
    "q8_0": (q8_0, Form.EIGHT_BITS),
    "bfloat16": (lambda: torch.randn(OUT, IN).bfloat16().float(), Form.BFLOAT16),
    "float32": (lambda: torch.randn(OUT, IN), Form.FLOAT32),
    "zeros": (lambda: torch.zeros(OUT, IN), Form.FOUR_BITS),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_each_kind_of_weight_finds_its_form_and_loses_nothing(name: str) -> None:
    torch.manual_seed(1)
    make, form = WEIGHTS[name]
    weight = make().reshape(OUT, IN)
    linear = NativeLinear(weight, None)
    assert linear.form is form
    assert torch.equal(linear(torch.eye(IN)).T, weight)  # 96 rows: weights written out first
    assert torch.equal(torch.cat([linear(torch.eye(IN)[i : i + 3]) for i in range(0, IN, 3)]).T, weight)
    steps, step_bytes = linear.bytes.shape[1:]
    assert linear.bytes.dtype == torch.uint8
    assert linear.bytes.shape[0] % 2 == 0
    assert (steps * form.step, step_bytes) == (IN, form.step_bytes)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_one_value_that_does_not_fit_keeps_the_whole_weight(name: str) -> None:
    torch.manual_seed(2)
    weight = WEIGHTS[name][0]().reshape(OUT, IN)
    weight[OUT - 1, 7] += weight.abs().max() / 1000
    assert pack(weight)[0] is Form.FLOAT32
    assert torch.equal(NativeLinear(weight, None)(torch.eye(IN)).T, weight)


def test_inputs_that_make_no_whole_groups_stay_plain() -> None:
    weight = torch.zeros(5, 33)
    assert pack(weight)[0] is Form.BFLOAT16
    assert pack(torch.full((5, 33), 0.1))[0] is Form.FLOAT32
