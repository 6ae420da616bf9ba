"""What a captured region must not do is found on CPU tensors, where doing it fails nowhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cast_ray.errors import EngineError
from cast_ray.models.graph_safety import Watch
from cast_ray.models.replay import HostReplay
from cast_ray.transfer import upload

X = torch.arange(4.0)
READING: dict[str, Callable[[], object]] = {
    "item": lambda: X[1].item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "bool": lambda: bool((X > 1).all()),
    "int": lambda: int(X[2]),
    "index of a list": lambda: [0, 1, 2][X.long()[1]],
    "nonzero": lambda: X.nonzero(),
    "nonzero as a tuple": lambda: X.nonzero(as_tuple=True),
    "where": lambda: torch.where(X > 1),
    "masked_select": lambda: X.masked_select(X > 1),
    "mask as index": lambda: X[X > 1],
    "assignment by mask": lambda: X.clone().__setitem__(X > 1, X[:2]),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "repeat": lambda: torch.repeat_interleave(X, X.long()),
}
FINE: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (X * 2 + 1).cumsum(0),
    "gather": lambda: X[torch.arange(2)],
    "masked fill": lambda: X.masked_fill(X > 1, 0.0),
    "where of three": lambda: torch.where(X > 1, X, 0.0),
    "repeat to a known size": lambda: torch.repeat_interleave(X, X.long(), output_size=6),
    "repeat by a number": lambda: X.repeat_interleave(3, dim=0),
    "topk": lambda: X.topk(2),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READING)
def test_a_read_is_counted_once_and_refused_where_strict(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        with Watch() as watch:
            READING[name]()
        assert sum(watch.reads.values()) >= 1
        assert not watch.uploads
        with pytest.raises(EngineError, match="waits for values"), Watch(strict=True):
            READING[name]()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FINE)
def test_work_that_stays_on_the_device_is_not(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), Watch(strict=True) as watch:
        FINE[name]()
    assert not watch.reads
    assert not watch.uploads


def test_copies_of_the_hosts_values_are_found_and_queued_ones_only_where_they_would_be_frozen() -> None:
    with Watch() as watch:
        torch.tensor([1, 2])
    assert sum(watch.uploads.values()) == 1
    with Watch() as watch:
        assert upload([1, 2], X.device).tolist() == [1, 2]
    assert not watch.uploads
    with pytest.raises(EngineError, match="copies values of the host"), Watch(strict=True):
        upload([1, 2], X.device)


def test_what_is_on_the_host_already_is_read_without_a_wait() -> None:
    with Watch() as watch:
        read = (X + 1).cpu()
        assert read[:2].tolist() == [1.0, 2.0]
        assert read.view(2, 2).numpy().sum() == 10
        born = torch.from_numpy(np.arange(3))
        assert born.tolist() == [0, 1, 2]
    assert sum(watch.reads.values()) == 1
    assert not watch.uploads
    with Watch() as watch:
        moved = born.to(X.device)
        made = torch.from_numpy(np.arange(3)).to(X.device)
        assert upload([1], X.device).tolist() == [1]
    assert moved is born
    assert made.shape == (3,)
    assert sum(watch.uploads.values()) == 1
    assert sum(watch.reads.values()) == 1


def test_what_outlives_the_region_is_named() -> None:
    kept: list[Tensor] = []
    with Watch() as watch:
        out = X + 1
        (X * 2).sum()
        kept.append(X * 3)
        view = X[1:]
    assert watch.survivors(out) == ["mul"]
    assert watch.survivors(out, kept) == []
    assert view.shape == (3,)


def test_a_recording_reads_its_inputs_where_they_lie_and_writes_over_its_outputs() -> None:
    buffer = torch.ones(3)
    recording = HostReplay()
    (out,) = recording.capture(lambda: (buffer * 2,))
    place = out.data_ptr()
    buffer.fill_(5.0)
    assert out.tolist() == [2.0] * 3
    recording.replay()
    assert out.tolist() == [10.0] * 3
    assert out.data_ptr() == place


def test_a_recording_refuses_what_a_cuda_graph_would_freeze_or_fail_at() -> None:
    with pytest.raises(EngineError, match="captured region"):
        HostReplay().capture(lambda: (X[X > 1],))
    kept: list[Tensor] = []

    def keeps() -> tuple[Tensor, ...]:
        kept.append(X * 3)
        return (X + 1,)

    with pytest.raises(EngineError, match="outlive it"):
        HostReplay().capture(keeps)
