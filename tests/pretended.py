"""A CUDA device where there is none: its tensors lie on the host, and what CUDA refuses is refused.

A ``There`` says that it lies on cuda:0 and keeps its values in a tensor of the host. An operation over both kinds fails
as it would with a GPU, and so does whatever a CUDA graph cannot hold while one is recorded. A recording repeats the
same operations on the same memory, and knows of numbers and lengths only what was true when it was made. What this does
not have are CUDA's own kernels, and its rules for memory and streams.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anabranch.model.backends import backend_for
from anabranch.model.decoder import Decoder
from anabranch.native import build

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# an index may lie on the host, at the price of a transfer
INDEXING = {aten.index, aten.index_put, aten.index_put_}
# what brings a number to the host, or one of the host's into a recording
READS = {aten._local_scalar_dense, aten.item, aten.nonzero, aten.masked_select, aten.lift_fresh, aten.lift_fresh_copy}

# make memory without filling it
MEMORY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
_tape: list[Call] | None = None  # what is being recorded


@dataclass
class Work:
    """The work that a device was given.

    kernels   by operation, inside graphs and outside; copies between host and device among them
    launches  what the host started: kernels outside of graphs, copies, and replayed graphs
    reads     values that the host waited for
    written   bytes that kernels wrote
    """

    kernels: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    reads: int = 0
    written: int = 0


_work: Work | None = None
_replaying = False


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    """Count the work of the device inside."""
    global _work
    before, _work = _work, Work()
    try:
        yield _work
    finally:
        _work = before


def _count(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """An operation is one kernel if it makes or changes values, and none if it returns a view of its arguments."""
    if _work is None:
        return
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    packet = func.overloadpacket
    here = packet is aten.cpu or (packet in (aten.to, aten._to_copy) and any(isinstance(x, There) for x in tensors))
    if packet in READS - {aten.lift_fresh, aten.lift_fresh_copy} or (here and outs and not isinstance(outs[0], There)):
        _work.reads += 1
    if not any(isinstance(x, There) for x in (*tensors, *outs)):
        return
    places = {_place(x) for x in tensors}
    new = [x for x in outs if _place(x) not in places]
    changed = [
        x
        for argument, x in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(x, Tensor)
    ]
    if packet in MEMORY or not (new or changed):
        return
    _work.kernels[packet.__name__] += 1
    _work.launches += not _replaying
    _work.written += sum(x.nbytes for x in new)
    _work.written += sum(x.nbytes for x in changed) if packet is aten.copy_ else 0


def _place(x: Tensor) -> int:
    """The memory that a tensor lies in."""
    return (x.held if isinstance(x, There) else x).untyped_storage().data_ptr()


class There(Tensor):
    """A tensor that says it lies on cuda:0."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        strides, offset = held.stride(), held.storage_offset()
        made: There = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=strides, storage_offset=offset, dtype=held.dtype, device=CUDA
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        assert _tape is None, "a number was read while recording"
        if _work is not None:
            _work.reads += 1
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"There({self.held!r})"


class _Mode(TorchDispatchMode):
    """Sees what makes tensors there, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = _compute(func, args, kwargs)
    _count(func, args, kwargs, out)
    if _tape is not None:
        _tape.append((func, args, kwargs, out))
    return out


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, There)]
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    asked = named.get("device")
    if not there and (asked is None or torch.device(asked).type != "cuda"):
        if _tape is not None and func.overloadpacket in READS:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        return func(*args, **kwargs)
    packet = func.overloadpacket
    if packet is aten._has_compatible_shallow_copy_type:
        return isinstance(args[0], There) == isinstance(args[1], There)
    if packet in (aten.to, aten.cpu, aten._to_copy):
        return _moved(func, args, kwargs)
    host = [x for x in tensors if not isinstance(x, There) and x.dim()]
    masks = packet in INDEXING and any(x.dtype == torch.bool for x in tensors[1:])  # how many, is a number
    if _tape is not None and (packet in READS or host or masks):
        raise RuntimeError(f"{func} is not permitted when stream is capturing")
    if packet is aten.copy_:
        into, values = (x.held if isinstance(x, There) else x for x in args[:2])
        into.copy_(values)
        return args[0]
    indices = tree_leaves(args[1]) if packet in INDEXING and isinstance(args[0], There) else []
    if there and any(all(x is not y for y in indices) for x in host):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")
    held_args, held_kwargs = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
    if kwargs.get("device") is not None:
        held_kwargs["device"] = torch.device("cpu")
    known = {id(x.held): x for x in there}
    # views of what is no inference tensor are none either
    usual = bool(there) and not any(x.is_inference() for x in there)

    def back(x: Any) -> Any:
        if not isinstance(x, Tensor) or packet is aten._local_scalar_dense:
            return x
        if id(x) in known:
            return known[id(x)]
        with torch.inference_mode(False) if usual else contextlib.nullcontext():
            return There(x)

    return tree_map(back, func(*held_args, **held_kwargs))


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.to`` in all its forms."""
    x: Tensor = args[0]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    like = named.get("other", x)
    device, dtype = named.get("device"), named.get("dtype")
    device = torch.device("cpu") if func.overloadpacket is aten.cpu else torch.device(device or like.device)
    dtype = dtype or like.dtype
    same = device.type == x.device.type
    if same and dtype == x.dtype and not named.get("copy") and func.overloadpacket is not aten._to_copy:
        return x
    if _tape is not None and not same:
        raise RuntimeError(f"{func} is not permitted when stream is capturing")
    held = (x.held if isinstance(x, There) else x).to(dtype, copy=True)
    return There(held) if device.type == "cuda" else held


class Capture:
    """Stands for ``model.graphs.CudaCapture``."""

    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def __call__(
        self, compute: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
    ) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        global _tape
        calls: list[Call] = []
        _tape = calls
        try:
            found = compute(*inputs)
        finally:
            _tape = None
        outputs = tuple(x.clone() for x in found)  # places of their own
        return lambda: _repeat(calls, found, outputs), outputs


def _repeat(calls: list[Call], found: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    new: dict[int, Tensor] = {}

    def current(x: Any) -> Any:
        return new.get(id(x), x) if isinstance(x, Tensor) else x

    global _replaying
    if _work is not None:
        _work.launches += 1
    _replaying = True
    for func, args, kwargs, out in calls:
        given = tree_map(current, args), tree_map(current, kwargs)
        again = _compute(func, *given)
        _count(func, *given, again)
        for old, fresh in zip(tree_leaves(out), tree_leaves(again), strict=True):
            if isinstance(old, Tensor):
                new[id(old)] = fresh
    _replaying = False
    for place, x in zip(outputs, found, strict=True):
        place.held.copy_(current(x).held)  # a graph of CUDA has written its outputs already


def _there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a tensor on the host first: ``torch.tensor`` with a device does not ask any mode."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        return x if device is None else x.to(device)

    return made


# what PyTorch asks of a device before its operations; a CPU build has none for CUDA
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct One : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new One());
"""


@cache
def _register() -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this PyTorch knows CUDA itself")
    if (compiler := build.compiler()) is None:
        pytest.skip("there is no C++ compiler")
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD, encoding="utf-8")
        libraries = [f"-L{home / 'lib'}", "-lc10"]
        subprocess.run(
            [
                *compiler,
                "-std=c++20",
                "-shared",
                "-fPIC",
                f"-I{home / 'include'}",
                str(source),
                "-o",
                str(made),
                *libraries,
            ],
            check=True,
            timeout=600,
        )
        ctypes.CDLL(str(made))


@contextlib.contextmanager
def cuda() -> Iterator[torch.device]:
    """Inside there is one CUDA device. Skips the test where there is a real one, or no C++ compiler."""
    _register()
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else Module.to loses the class of a parameter
    about = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "pretended",
        "mem_get_info": lambda device=None: (1 << 33, 1 << 33),
        "get_device_properties": lambda device=None: SimpleNamespace(L2_cache_size=50 << 20),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 0,
        "_lazy_init": lambda: None,
    }
    try:
        with (
            mock.patch.multiple(torch.cuda, **about),
            mock.patch.multiple(torch, tensor=_there(torch.tensor), as_tensor=_there(torch.as_tensor)),
            mock.patch("anabranch.model.graphs.CudaCapture", Capture),
            # fused operations are their definitions here
            mock.patch("anabranch.model.device.layers._tried", return_value=True),
            _Mode(),
        ):
            yield CUDA
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)


def there(target: Decoder) -> Decoder:
    """The same target on the device, as ``fill_decoder`` makes it."""
    moved = copy.deepcopy(target).to(CUDA)
    moved.backend = backend_for(CUDA)
    return moved
