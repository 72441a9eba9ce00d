"""The C structs and functions for ctypes: their fields and arguments are read from the sources that describe them."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any, TypeAlias, TypeVar

from anabranch.native.recipe import sources

__all__ = [
    *("Cross", "Ends", "Layer", "Layers", "LowRank", "Packed", "RaggedBatch", "Rider", "Screen", "Shape"),
    *("StreamLayer", "Streams", "Table", "Taps", "Terms", "functions", "mirrored"),
]

S = TypeVar("S", bound=ctypes.Structure)
_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float,
}  # fmt: skip


@cache
def _text(kind: str) -> str:
    """The sources of a kind, "h" or "cpp", without comments."""
    return re.sub(r"//.*", "", "\n".join(path.read_text(encoding="utf-8") for path in sources(kind)))


@cache
def functions() -> dict[str, tuple[Any, ...]]:
    """The arguments of each C function that returns a status or a number, by its name without ``anabranch_``."""
    declared = re.findall(r"^int anabranch_(\w+)\(([^)]*)\)", _text("cpp"), re.MULTILINE)
    return {
        name: tuple(
            ctypes.c_void_p if "*" in each else _NUMBERS[each.split()[0]] for each in arguments.split(",") if each
        )
        for name, arguments in declared
    }


def fields_of(struct: str) -> tuple[tuple[str, Any], ...]:
    """The ``_fields_`` of a struct: numbers, pointers, arrays, and structs of this module; methods come after them.

    struct Screen {                    ("copy", Packed),
      Packed copy;                     ("error", c_void_p),
      const float *error, *size;       ("size", c_void_p)
    };
    """
    if not _text("h"):  # an application that was frozen without the sources, which finds no kernels either
        return ()
    body = re.search(rf"^struct {struct} {{\n(.*?)^}};", _text("h"), re.DOTALL | re.MULTILINE)
    assert body is not None, f"the headers have no struct {struct}"
    fields: list[tuple[str, Any]] = []
    for declaration in re.sub(r"\n[^\n]*\(.*", "", "\n" + body[1], flags=re.DOTALL).split(";"):
        words = declaration.replace("const ", "").split(maxsplit=1)
        for variable in words[1].split(",") if words else ():
            name, size = re.findall(r"\w+", variable.partition("[")[0])[-1], re.search(r"\[(\w+)\]", variable)
            pointer = "*" in variable or words[0].endswith("*")
            kind = ctypes.c_void_p if pointer else _NUMBERS.get(words[0]) or globals()[words[0]]
            fields.append((name, kind if size is None else kind * _constant(size[1])))
    return tuple(fields)


def _constant(name: str) -> int:
    value = re.search(rf"constexpr int {name} = (\d+);", _text("h"))
    assert value is not None, f"the headers have no constant {name}"
    return int(value[1])


def mirrored(struct: type[S]) -> type[S]:
    """Give a class the fields of the struct of the same name."""
    struct._fields_ = fields_of(struct.__name__)
    return struct


@mirrored
class Packed(ctypes.Structure):
    """A packed weight [outputs, width]; ``kind`` is one of ``KINDS``."""


@mirrored
class Screen(ctypes.Structure):
    """A copy of a weight in int8 and its bounds, float32 [outputs in whole blocks]."""


@mirrored
class Table(ctypes.Structure):
    """Embeddings [words, width]: row by row, ``packed`` like a weight of the same type (1), or rows of a file (2)."""


@mirrored
class Cross(ctypes.Structure):
    """The weights of a layer's attention to the sources of the rows."""


@mirrored
class Layer(ctypes.Structure):
    """The weights and the cache of one layer."""


Layers: TypeAlias = ctypes.Array[Layer]


@mirrored
class Shape(ctypes.Structure):
    """Sizes shared by all layers."""


@mirrored
class RaggedBatch(ctypes.Structure):
    """The nodes of a pass."""


@mirrored
class Ends(ctypes.Structure):
    """The start of a pass, from tokens, and its end: the last norm, and the tokens that the head chooses."""


@mirrored
class LowRank(ctypes.Structure):
    """A low-rank term x -> (x down') up'; no data: none."""


@mirrored
class Terms(ctypes.Structure):
    """The low-rank terms of a layer's products."""


@mirrored
class StreamLayer(ctypes.Structure):
    """A low-rank term for streams only, which is added to the layer's MLP or replaces it."""


@mirrored
class Streams(ctypes.Structure):
    """Streams of each node of a pass."""


@mirrored
class Rider(ctypes.Structure):
    """Streams that ride in a pass, and pruning."""


@mirrored
class Taps(ctypes.Structure):
    """The rows of nodes before some layers of a pass, ascending."""
