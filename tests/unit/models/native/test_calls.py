"""Compiled linear layers: PyTorch's numbers, and the same bits in every company and with every number of threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cast_ray.models import native

if sys.platform != "linux":
    pytest.skip("compiled kernels are for Linux", allow_module_level=True)
assert native.available(), "numba is a dependency, so a failure to compile is one"

from cast_ray.models.native.calls import NativeLinear  # noqa: E402
from cast_ray.models.native.forms import Form  # noqa: E402


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights() -> list[Tensor]:
    """One of each form."""
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (70, 4, 32)).float()
    codes[..., 0] = 127
    nibbles = torch.randint(0, 16, (70, 4, 32)).float()
    nibbles[..., 0], nibbles[..., 1] = 0, 15
    plain = torch.randn(70, 128)
    return [plain, plain.bfloat16().float(), (nibbles * 0.25 - 2).view(70, 128), (codes * 0.125).view(70, 128)]


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_are_pytorchs(form: Form, bias: bool) -> None:
    weight = weights()[form]
    plain = nn.Linear(128, 70, bias=bias).requires_grad_(False)
    plain.weight.copy_(weight)
    linear = NativeLinear(weight, plain.bias)
    assert linear.form is form
    for count in (1, 2, 3, 4, 5, 7, 8, 13, 64, 259):
        rows = torch.randn(count, 128)
        torch.testing.assert_close(linear(rows), plain(rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", list(Form))
def test_a_row_has_the_same_bits_alone_and_among_others(form: Form) -> None:
    linear = NativeLinear(weights()[form], None)
    rows = torch.randn(300, 128)
    alone = torch.cat([linear(row[None]) for row in rows])
    for count in (2, 3, 4, 6, 7, 8, 9, 10, 11, 31, 256, 257, 300):
        torch.set_num_threads(1 + count % 3)
        assert torch.equal(linear(rows[:count]), alone[:count]), count


def test_callers_in_several_threads_do_not_meet() -> None:
    torch.set_num_threads(2)
    linear = NativeLinear(weights()[0], None)
    inputs = [torch.randn(5, 128) for _ in range(4)]
    expected = [linear(rows) for rows in inputs]
    wrong = []

    def ask(index: int) -> None:
        for _ in range(200):
            if not torch.equal(linear(inputs[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_without_its_parents_threads() -> None:
    torch.set_num_threads(2)
    linear = NativeLinear(weights()[0], None)
    rows = torch.randn(3, 128)
    expected = linear(rows)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(rows), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
