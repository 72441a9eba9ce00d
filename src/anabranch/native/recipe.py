"""The sources of the kernels, and the compiler flags of each instruction set.

It imports only the standard library: the package's build (``hatch_build.py``) loads it by itself. All C++ files of this
folder and of each method's folder (``methods/NAME/*.cpp``) are compiled as one translation unit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "FLAGS",
    "INSTRUCTION_SETS",
    "LINK",
    "PACKAGE",
    "PACKAGED",
    "PACKED",
    "PROBE",
    "digest",
    "key_of",
    "libraries_for",
    "machine_flags",
    "preferred",
    "probe_key",
    "sources",
    "translation_unit",
]

PACKAGE = Path(__file__).resolve().parents[1]
EXPORTS = PACKAGE / "native" / "exports.map"
PROBE = PACKAGE / "native" / "processor.c"
PACKED = PACKAGE / "native" / "libraries"  # the libraries of a wheel, named kernels-NAME-KEY-SHA256.so
# without errno, sqrt is one instruction; a product and a sum are fused only where the sources say so
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")
# A C++ runtime that is linked into a library stays private to it: torch brings another one.
LINK = ("-shared", "-pthread", f"-Wl,--version-script={EXPORTS}")

AVX2 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma"))
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
VNNI = AVX512 | {"avx512_vnni"}
BF16 = VNNI | {"avx512_bf16"}
# GCC's and Clang's names of processor features, where they are not Linux's without underscores
OPTIONS = {"amx_bf16": "amx-bf16", "amx_tile": "amx-tile", "bmi1": "bmi"}


def machine_flags(features: Iterable[str]) -> tuple[str, ...]:
    """The compiler flags for processor features, as Linux names them."""
    return tuple(f"-m{OPTIONS.get(each, each.replace('_', ''))}" for each in sorted(features))


def _named(name: str, features: frozenset[str], *macros: str) -> tuple[frozenset[str], tuple[str, ...]]:
    return features, (*machine_flags(features), *(f"-DANABRANCH_{macro}" for macro in (*macros, f'KERNELS="{name}"')))


# one library, which uses AMX tiles where the processor has them; bf16 is multiplied in pairs (AVX512_BF16) elsewhere
_TILES, _WITH_TILES = _named("avx512_bf16", BF16 | {"amx_tile", "amx_bf16"}, "PAIRS")

# processor features that each instruction set requires, and the compiler flags of its library; the fastest first
INSTRUCTION_SETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (_TILES, _WITH_TILES),
    "avx512_bf16": (BF16, _WITH_TILES),
    "avx512_vnni": _named("avx512_vnni", VNNI),
    "avx512": _named("avx512", AVX512),
    "avx2_vnni": _named("avx2_vnni", AVX2 | {"avx_vnni"}, "AVX2"),
    "avx2": _named("avx2", AVX2, "AVX2"),
}
# The libraries of a wheel for any machine: that of AMX is avx512_bf16's. Each takes 40 s of a processor to compile, so
# such a wheel has none for Intel's server processors of 2017 and 2018, which lack VNNI; without a compiler they run
# avx2's.
PACKAGED = ("avx512_bf16", "avx512_vnni", "avx2_vnni", "avx2")


def preferred(features: Iterable[str], vendor: str) -> list[str]:
    """The instruction sets that a processor with these features supports and gains from, the fastest first."""
    supported = [name for name, (needed, _) in INSTRUCTION_SETS.items() if needed <= frozenset(features)]
    # Intel's processors of the generation that also has AMX take two cycles for a product of bf16 pairs (AVX512_BF16),
    # in which they do four products of floats: 1.29 and 5.3 G instructions/s on a core of a Xeon without AMX
    # (docs/log.md).
    return [name for name in supported if name != "avx512_bf16" or vendor != "GenuineIntel"]


def libraries_for(features: Iterable[str], vendor: str) -> tuple[str, ...]:
    """The libraries of a wheel for a processor: its fastest, and avx2's; all of PACKAGED if no kernels run on it.

    Where AMX is the fastest, the next one is among them: the system may refuse tiles.
    """
    names = preferred(features, vendor)
    if not names:
        return PACKAGED
    fastest = names[: 2 if names[0] == "amx" else 1]
    wanted = {"avx2", *("avx512_bf16" if name == "amx" else name for name in fastest)}
    return tuple(name for name in INSTRUCTION_SETS if name in wanted)


def sources(kind: str = "cpp") -> list[Path]:
    """The files of this kind, "cpp" or "h": those of this folder, then those of each method."""
    return [*sorted(PACKAGE.glob(f"native/*.{kind}")), *sorted(PACKAGE.glob(f"methods/*/*.{kind}"))]


def translation_unit() -> list[str]:
    """The compiler's arguments that name all sources, as one translation unit."""
    included = [word for path in sources() for word in ("-include", str(path))]
    return ["-I", str(PACKAGE / "native"), *included, "-x", "c++", os.devnull]


def digest() -> str:
    """A digest of all sources, which identifies the kernels of a measurement."""
    files = [*sources(), *sources("h")]
    texts = [(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def key_of(*parts: object) -> str:
    """A hash of all sources and of ``parts`` (flags, the processor), which is in a library's file name."""
    return hashlib.sha256(repr((digest(), *parts)).encode()).hexdigest()[:16]


def probe_key() -> str:
    """The same for the library that asks the processor for its features."""
    return hashlib.sha256(PROBE.read_bytes()).hexdigest()[:16]
