"""Compile ``kernels.cpp`` once a machine, load it, and call it on torch tensors.

The library is kept in the cache folder under the hash of its source, compiler and processor; a second process only
loads it. It comes in forms: for AVX2, for AVX-512, and with products of bf16 in AMX's tiles; the best that the
processor has is taken. Without a compiler, AVX2 or Linux ``library()`` is None, and ``why_not()`` says why.

M rows, D width, N outputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import InputError
from anabranch.files import cache_home
from anabranch.processor import processor_flags

__all__ = [
    "BLOCK",
    "KINDS",
    "WIDEST",
    "Draft",
    "Ends",
    "Entry",
    "Layer",
    "Library",
    "Nodes",
    "Packed",
    "Shape",
    "Step",
    "library",
    "why_not",
]

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(SOURCE.with_name(name) for name in ("numbers.h", "avx512.h", "avx2.h"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
AVX512 = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl"))
# what the forms need of a processor, and flags besides, the best one first
FORMS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (AVX512 | {"amx_tile", "amx_bf16"}, ("-DANABRANCH_TILES", "-mamx-tile", "-mamx-bf16")),
    "avx512": (AVX512, ()),
    "avx2": (frozenset(("avx2", "fma", "f16c")), ("-DANABRANCH_AVX2",)),
}
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): tiles are 8 KB that the system would have to save for every
# thread, so a process asks for them first (Linux, Documentation/arch/x86/xstate.rst)
ASK_FOR_TILES = (158, 0x1023, 18)
# in a process of its own, which a fault may end: whether a library's products are right
CHECK = f"""
import ctypes, sys
ctypes.CDLL(None).syscall(*{ASK_FOR_TILES})
sys.exit(0 if ctypes.CDLL(sys.argv[1]).anabranch_multiplies() == 1 else 1)
"""
BLOCK = 32
WIDEST = 8192  # of the rows that the kernels read embeddings into
KINDS = {"bfloat16": 0, "float32": 1, "int8": 2, "int4": 3}  # of packed weights
PAGE = 2**21
ARENA = 2**26


class Packed(ctypes.Structure):
    """A packed weight [outputs, width]; ``kind`` is one of ``KINDS``."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("outputs", "width", "kind")))


class Table(ctypes.Structure):
    """Embeddings [vocabulary, width]: row by row, or ``packed`` as a weight of the rows' type is."""

    _fields_ = (("rows", ctypes.c_void_p), ("packed", ctypes.c_int64))


class Layer(ctypes.Structure):
    """Weights of one layer and where its cache lies."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm_in", "norm_mlp", "q_norm", "k_norm", "qkv_bias", "out_bias")),
        *((name, Packed) for name in ("qkv", "out", "up", "down", "low", "high")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class Shape(ctypes.Structure):
    """Sizes that all layers share."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("d", "heads", "kv_heads", "e", "inner", "rope_dim")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class Step(ctypes.Structure):
    """The rows of one pass. Without ``x`` they are made and kept inside."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "nodes", "window", "trailing")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "lengths", "parents")),
    )


class Ends(ctypes.Structure):
    """How a pass begins, from tokens, and ends, behind the last norm and with the tokens that the head chooses."""

    _fields_ = (
        ("embedding", Table),
        *((name, ctypes.c_void_p) for name in ("tokens", "norm", "hidden")),
        ("head", Packed),
        ("bias", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
    )


class Entry(ctypes.Structure):
    """How streams that trail begin."""

    _fields_ = (
        ("main", ctypes.c_void_p),
        ("nodes", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("embedding", Table),
        ("emitted", ctypes.c_void_p),
        ("inputs", Packed),
        ("up", Packed),
        *((name, ctypes.c_void_p) for name in ("streams", "hidden", "norm")),
    )


class Draft(ctypes.Structure):
    """How one row's stream states become a tree."""

    _fields_ = (
        ("embedding", Table),
        *((name, Packed) for name in ("token", "state", "carry", "to_state", "head", "own")),
        ("ids", ctypes.c_void_p),
        ("own_ids", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("d", "depth", "best", "nodes", "frontier", "blocks")),
        ("least", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("warmth", ctypes.c_float),
        ("trust", ctypes.c_float),
    )


Layers: TypeAlias = ctypes.Array[Layer]
# tokens, parents and depths of a tree's nodes and their joint log probabilities
Nodes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


class Library:
    """The compiled kernels with their threads, as many as torch uses."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        self._c.anabranch_form.restype = ctypes.c_char_p
        self._c.anabranch_runner.restype = ctypes.c_void_p
        self._c.anabranch_runner.argtypes = (ctypes.c_int,)
        self._c.anabranch_packed_bytes.restype = ctypes.c_int64
        self._c.anabranch_packed_bytes.argtypes = (ctypes.POINTER(Packed),)
        self._c.anabranch_pack.argtypes = (ctypes.POINTER(Packed), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._c.anabranch_advise.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._c.anabranch_linear.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            *(ctypes.POINTER(Packed), ctypes.c_void_p, ctypes.c_void_p),
        )
        self._c.anabranch_norm.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p),
        )
        self._c.anabranch_best.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        )
        self._c.anabranch_choose.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
            *(ctypes.POINTER(Packed), ctypes.c_void_p, ctypes.c_void_p),
        )
        self._c.anabranch_draw.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_float),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        self._c.anabranch_draft.restype = ctypes.c_int
        self._c.anabranch_draft.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Draft), ctypes.c_void_p, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        )
        self._c.anabranch_layers.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Shape), ctypes.c_void_p, ctypes.c_int),
            *(ctypes.POINTER(Step), ctypes.POINTER(Ends), ctypes.c_void_p, ctypes.c_int),
        )
        self._c.anabranch_trail.argtypes = (
            *(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Shape), ctypes.c_void_p, ctypes.c_int),
            *(ctypes.POINTER(Step), ctypes.POINTER(Entry), ctypes.c_void_p),
        )
        self._c.anabranch_move.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int),
        )
        self._lock = threading.Lock()  # one pass at a time: the threads and their scratch memory are shared
        self._threads = 0  # what they take while torch is down to one; 0: as many as torch has
        self._free = torch.empty(0, dtype=torch.uint8)
        self._runners: dict[tuple[int, int], int] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Torch keeps to one thread meanwhile: its others would spin where the kernels' threads want to run."""
        threads = torch.get_num_threads()
        if self._threads or threads == 1:
            yield
            return
        self._threads = threads
        torch.set_num_threads(1)
        try:
            yield
        finally:
            self._threads = 0
            torch.set_num_threads(threads)

    def _run(self) -> int:
        """The threads of this process, as many as torch has."""
        key = (os.getpid(), self._threads or torch.get_num_threads())
        if key not in self._runners:
            self._runners[key] = self._c.anabranch_runner(key[1])
        return self._runners[key]

    @property
    def form(self) -> str:
        """One of ``FORMS``."""
        return str(self._c.anabranch_form().decode())

    def pack(
        self, kind: str, weight: Tensor, scale: Tensor | None = None, least: Tensor | None = None
    ) -> tuple[Packed, Tensor]:
        """A weight [N, D] in blocks of 32 outputs (the last one padded) and the memory that it lies in.

        ``weight`` is of the type that ``kind`` names, D even; or quantised values, uint8, D in whole groups of 32,
        with ``scale`` and ``least`` as ``model.quantize`` has them.
        """
        given = [None if x is None else x.detach().cpu().contiguous() for x in (weight, scale, least)]
        packed = Packed(None, *weight.shape, KINDS[kind])
        memory = self._room(int(self._c.anabranch_packed_bytes(ctypes.byref(packed))))
        packed.data = memory.data_ptr()
        self._c.anabranch_pack(ctypes.byref(packed), *(None if x is None else x.data_ptr() for x in given))
        return packed, memory

    def large(self, size: int) -> Tensor:
        """``size`` bytes that the system may back with large pages, which are read up to twice as fast."""
        whole = torch.empty(size + PAGE, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE
        self._c.anabranch_advise(whole[start:].data_ptr(), size)
        return whole[start : start + size]

    def _room(self, size: int) -> Tensor:
        """Memory for ``size`` bytes in large pages; lasting pieces share them."""
        if size < PAGE // 8:
            return torch.empty(size, dtype=torch.uint8)
        with self._lock:
            if len(self._free) < size:
                # pages are only taken when written to: what is left over at the end costs nothing
                self._free = self.large(max(ARENA, size))
            taken, self._free = self._free[:size], self._free[size + -size % 64 :]
            return taken

    def linear(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> Tensor:
        """Rows times a packed weight, plus a float32 bias: float32 [M, N].

        Rows are of the weight's type; for a quantised one bf16 or float32.
        """
        x_MD = x_MD.contiguous()
        y = torch.empty(x_MD.shape[0], packed.outputs)
        bias = None if bias_N is None else bias_N.data_ptr()
        with self._lock:
            self._c.anabranch_linear(
                *(_kind(x_MD), self._run(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias, y.data_ptr())
            )
        return y

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """RMS norm of float32 rows [..., D] by a float32 weight, as ``dtype``."""
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=dtype)
        width = x.shape[-1]
        self._c.anabranch_norm(_kind(y), x.data_ptr(), x.numel() // width, width, weight.data_ptr(), eps, y.data_ptr())
        return y

    def best(self, z_MN: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest log probabilities of float32 scores [M, N], falling, and their places [M, count]."""
        z_MN = z_MN.contiguous()
        values, places = torch.empty(len(z_MN), count), torch.empty(len(z_MN), count, dtype=torch.long)
        self._c.anabranch_best(z_MN.data_ptr(), *z_MN.shape, count, values.data_ptr(), places.data_ptr())
        return values, places

    def choose(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> Tensor:
        """Where the largest entry of each row of ``linear`` first stands: int64 [M]. The scores are not kept."""
        x_MD = x_MD.contiguous()
        places = torch.empty(len(x_MD), dtype=torch.long)
        bias = None if bias_N is None else bias_N.data_ptr()
        with self._lock:
            self._c.anabranch_choose(
                *(_kind(x_MD), self._run(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias, places.data_ptr())
            )
        return places

    def draw(self, z_MN: Tensor, temperature: float, keys_M: NDArray[np.uint64]) -> Tensor:
        """The largest of each row of float32 scores [M, N] / temperature + ``sampling.gumbels``: int64 [M]."""
        z_MN, keys_M = z_MN.contiguous(), np.ascontiguousarray(keys_M, np.uint64)
        places = torch.empty(len(z_MN), dtype=torch.long)
        with self._lock:
            self._c.anabranch_draw(
                *(self._run(), z_MN.data_ptr(), *z_MN.shape, temperature, keys_M.ctypes.data, places.data_ptr())
            )
        return places

    def draft(self, how: Draft, states_SD: Tensor, root: int) -> Nodes:
        """A tree's nodes, breadth first, the root among them.

        States and embeddings are float32 where the weights are, else bf16.
        """
        states_SD = states_SD.contiguous()
        integers, joints = np.empty((3, how.nodes), np.int64), np.empty(how.nodes, np.float32)
        tokens, parents, depths = integers
        with self._lock:
            n = self._c.anabranch_draft(
                *(how.head.kind, self._run(), ctypes.byref(how), states_SD.data_ptr(), root),
                *(tokens.ctypes.data, parents.ctypes.data, depths.ctypes.data, joints.ctypes.data),
            )
        return tokens[:n], parents[:n], depths[:n], joints[:n]

    def layers(
        self,
        shape: Shape,
        layers: Layers,
        step: Step,
        ends: Ends | None = None,
        tap: Tensor | None = None,
        tapped: int = 0,
    ) -> None:
        """Run layers over ``step.x`` in place; keys and values are written behind the committed ones.

        The cache is float32 where the weights are, else bf16. All of a layer's weights are quantised, or none is.
        With ``ends`` the pass is a whole one, from tokens to tokens. ``tap`` takes the rows as they are before layer
        ``tapped`` of these.
        """
        pointer = None if tap is None else tap.data_ptr()
        with self._lock:
            self._c.anabranch_layers(
                *(layers[0].qkv.kind, self._run(), ctypes.byref(shape), layers, len(layers)),
                *(ctypes.byref(step), None if ends is None else ctypes.byref(ends), pointer, tapped),
            )

    def trail(self, shape: Shape, layers: Layers, step: Step, entry: Entry, states: Tensor) -> None:
        """Streams from the main rows that they trail, through ``layers`` and the last norm, into ``states``."""
        with self._lock:
            self._c.anabranch_trail(
                *(layers[0].qkv.kind, self._run(), ctypes.byref(shape), layers, len(layers)),
                *(ctypes.byref(step), ctypes.byref(entry), states.data_ptr()),
            )

    def move(
        self, keys: Tensor, values: Tensor, layers: range, slot: int, start: int, nodes: NDArray[np.int64]
    ) -> None:
        """In a cache [layers, rows, K, C, E], one row and some layers of it: start + nodes[i] goes to start + i; nodes
        ascend.
        """
        size = keys.element_size()
        layer, row, head, token, _ = (size * stride for stride in keys.stride())
        first = layers.start * layer + slot * row
        self._c.anabranch_move(
            *(keys.data_ptr() + first, values.data_ptr() + first, len(layers), keys.shape[2], layer, head, token),
            *(start, nodes.ctypes.data, len(nodes)),
        )


def _kind(x: Tensor) -> int:
    return KINDS[str(x.dtype).removeprefix("torch.")]


_reason = "the kernels have not been asked for yet"


def why_not() -> str:
    """Why ``library()`` is None."""
    return _reason


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The kernels, compiled if need be; None where they cannot be had.

    ANABRANCH_NATIVE=0 switches them off, and the name of a form takes none that is better. Raises InputError for
    another value.
    """
    global _reason
    _reason = _unfit()
    if _reason:
        return None
    for form in _forms():
        try:
            return Library(_compiled((*FLAGS, *FORMS[form][1])))
        except (OSError, subprocess.SubprocessError) as error:
            _reason = f"compiling them failed: {error}"
    return None


def _unfit() -> str:
    if _wanted() == "0":
        return "ANABRANCH_NATIVE is 0"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"they are for x86-64 Linux, not {platform.system()} on {platform.machine()}"
    if not _forms():
        return f"this processor lacks {sorted(FORMS['avx2'][0] - processor_flags())[0]}"
    if _compiler() is None:
        return "there is no C++ compiler; install g++ or set CXX"
    return ""


def _wanted() -> str:
    """What the user asks for: "0", the name of a form, or "1" for the best. Raises InputError."""
    wanted = os.environ.get("ANABRANCH_NATIVE") or "1"
    if wanted not in ("0", "1", *FORMS):
        raise InputError(
            f"ANABRANCH_NATIVE must be 0 (no native kernels), 1, or one of {', '.join(FORMS)}, not {wanted!r}"
        )
    return wanted


def _forms() -> list[str]:
    """Those of ``FORMS`` that this process may use."""
    wanted, names = _wanted(), list(FORMS)
    names = names[names.index(wanted) :] if wanted in names else names
    names = [name for name in names if FORMS[name][0] <= processor_flags()]
    if "amx" in names and ctypes.CDLL(None).syscall(*ASK_FOR_TILES) != 0:
        names.remove("amx")
    return names


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiled(flags: tuple[str, ...] = FLAGS) -> Path:
    """Where the library lies, compiled first if it is not there yet; safe among processes."""
    compiler = _compiler()
    assert compiler is not None
    named = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    source = [path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS)]
    identity = repr((source, flags, compiler, named, sorted(processor_flags())))
    path = cache_home() / "native" / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels.so"
            done = subprocess.run(
                [compiler, *flags, "-o", str(made), str(SOURCE)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise subprocess.SubprocessError(done.stderr.strip().splitlines()[-1] if done.stderr else compiler)
            if subprocess.run([sys.executable, "-c", CHECK, str(made)], check=False, timeout=60).returncode:
                raise subprocess.SubprocessError("their products are wrong on this processor")
            made.replace(path)
    return path
