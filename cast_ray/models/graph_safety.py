"""What a captured region must not do, found on tensors of any device, a CPU's too.

A CUDA graph replays kernels. Whatever the host decides from a tensor's values, copies to or from the host and shapes
that depend on values are frozen at capture or fail there. On a CPU nothing fails, so that code could only be tried on a
device; here the operations themselves are watched.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from cast_ray.errors import EngineError, describe

# Kinds of what was found: `read` makes the host wait for a device's values, or for a shape that they decide;
# `upload` copies values of the host, which waits too unless the memory is pinned (`cast_ray.transfer`); `lift` makes a
# tensor of them, on the host still.
Kind = Literal["read", "upload", "lift"]
READS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "bincount",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}
# Reads that no operation stands behind on a CPU: its memory is the host's.
READING_METHODS = {"tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
LIFTS = {"lift_fresh", "lift"}
# What is queued there nobody waits for; inside a captured region it would be frozen all the same.
QUEUED = "at transfer.py"


class _Methods(TorchFunctionMode):
    """What is called of tensors and of torch. hosts: tensors that are the host's own, whatever device is meant."""

    def __init__(self, watch: Watch, hosts: WeakTensorKeyDictionary) -> None:
        super().__init__()
        self._watch = watch
        self._hosts = hosts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        of_host = bool(args) and isinstance(args[0], Tensor) and args[0] in self._hosts
        if name in READING_METHODS and not of_host:
            self._watch.note("read", f"Tensor.{name}")
        elif name in ("tensor", "as_tensor") and not (args and isinstance(args[0], Tensor)):
            self._watch.note("upload", f"torch.{name}")
        elif name == "to" and of_host and any(isinstance(a, torch.device) for a in (*args, kwargs.get("device"))):
            self._watch.note("upload", "Tensor.to")
            del self._hosts[args[0]]
        else:
            return func(*args, **kwargs)
        # The operations behind it are the same wait once more.
        with self._watch.silence():
            out = func(*args, **kwargs)
        if name == "cpu":
            self._hosts[out] = True
        return out


class _Operations(TorchDispatchMode):
    """The operations behind that. made: what they made, with their names; hosts: as in `_Methods`."""

    def __init__(self, watch: Watch, made: WeakTensorKeyDictionary, hosts: WeakTensorKeyDictionary) -> None:
        super().__init__()
        self._watch = watch
        self._made = made
        self._hosts = hosts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_host = bool(tensors) and all(tensor in self._hosts for tensor in tensors)
        if name in LIFTS:
            # Values of the host that become a tensor: there they stay until somebody moves them.
            of_host = not self._watch.note("lift", str(func))
        elif not of_host and (
            name in READS or _shape_of_values(name, args, kwargs) or _between_devices(name, args, kwargs)
        ):
            self._watch.note("read", str(func))
        out = func(*args, **kwargs)
        given = _storages(tensors)
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor):
                continue
            if of_host:
                self._hosts[leaf] = True
            # A view of what was there takes no memory.
            if not _storages(leaf) <= given:
                self._made[leaf] = name
        return out


class Watch:
    """Within it, what a captured region must not do is counted; `strict` makes the first of it an EngineError.

    reads, uploads: by what was called and where. Nested watches each see everything.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.reads: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self._strict = strict
        self._silent = False
        self._made = WeakTensorKeyDictionary()
        self._hosts = WeakTensorKeyDictionary()
        self._modes: list[Any] = []

    def __enter__(self) -> Self:
        self._modes = [_Operations(self, self._made, self._hosts), _Methods(self, self._hosts)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        while self._modes:
            self._modes.pop().__exit__(kind, error, tb)

    def survivors(self, *kept: Any) -> list[str]:
        """Operations whose results are still alive and are none of `kept` (tensors, or trees of them).

        In a captured region they would hold on to memory of the graph, or hand its content to a later replay.
        """
        known = _storages(kept)
        return [name for tensor, name in self._made.items() if not _storages(tensor) <= known]

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Within it nothing is noted."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def note(self, kind: Kind, what: str) -> bool:
        """Count something, or raise where strict. Returns whether it makes a tensor of the device."""
        if self._silent:
            return True
        found = f"{what} {_caller()}"
        if self._strict:
            problem = "waits for values of the device" if kind == "read" else "copies values of the host"
            remedy = "Keep it on the device, with shapes that no value decides, or move it out of the captured region"
            raise EngineError(describe("captured region", found, problem, remedy))
        if kind == "lift":
            return QUEUED in found
        counter = self.reads if kind == "read" else self.uploads
        counter[found] += 1
        return True


def _storages(values: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    # Weights in a layout of oneDNN's own have no storage to ask for.
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_mkldnn}


def _caller() -> str:
    """The innermost line of this package outside this file."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        if "cast_ray" in frame.filename and frame.filename != __file__:
            return f"at {frame.filename.rsplit('cast_ray/', 1)[-1]}:{frame.lineno}"
    return ""


def _shape_of_values(name: str, args: Any, kwargs: Any) -> bool:
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        # (repeats) or (values, repeats, dim)
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
        return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    return False


def _between_devices(name: str, args: Any, kwargs: Any) -> bool:
    """A copy between unlike devices; 0-dimensional ones of the host go along with a kernel as its arguments."""
    if name == "_to_copy" and kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type != args[0].device.type
    if name == "copy_" and len(args) > 1 and isinstance(args[1], Tensor):
        return args[0].device.type != args[1].device.type
    return False
