"""The processor's features that the kernels use, by CPUID and XGETBV.

The wheel brings a small library that asks the processor. Without it, as in an editable installation, they are those
that Linux lists.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from anabranch.native import recipe
from anabranch.support.processor import processor_flags, processor_vendor

__all__ = ["Processor", "decoded", "processor"]

Cpuid: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]  # leaf, subleaf -> eax, ebx, ecx, edx

EAX, EBX, ECX, EDX = range(4)
OSXSAVE = 27  # bit of leaf 1, ECX: XGETBV is allowed
# register states in XCR0: SSE and AVX; with the masks and both halves of AVX-512; tiles
NONE, YMM, ZMM, TILES = 0, 0x6, 0xE6, 0x60000
# leaf, subleaf, register, bit, and the states that the system must save (Intel's manual, volume 2A, CPUID)
BITS: dict[str, tuple[int, int, int, int, int]] = {
    "fma": (1, 0, ECX, 12, YMM),
    "f16c": (1, 0, ECX, 29, YMM),
    "bmi1": (7, 0, EBX, 3, NONE),
    "avx2": (7, 0, EBX, 5, YMM),
    "bmi2": (7, 0, EBX, 8, NONE),
    "avx512f": (7, 0, EBX, 16, ZMM),
    "avx512dq": (7, 0, EBX, 17, ZMM),
    "avx512bw": (7, 0, EBX, 30, ZMM),
    "avx512vl": (7, 0, EBX, 31, ZMM),
    "avx512_vnni": (7, 0, ECX, 11, ZMM),
    "amx_bf16": (7, 0, EDX, 22, TILES),
    "amx_tile": (7, 0, EDX, 24, TILES),
    "amx_int8": (7, 0, EDX, 25, TILES),
    "avx_vnni": (7, 1, EAX, 4, YMM),
    "avx512_bf16": (7, 1, EAX, 5, ZMM),
}


@dataclass(frozen=True)
class Processor:
    """The vendor's name, e.g. "GenuineIntel", and features in Linux's names that processor and system support."""

    vendor: str
    features: frozenset[str]


def decoded(cpuid: Cpuid, saved_states: Callable[[], int]) -> Processor:
    """The processor that answers so to CPUID; ``saved_states`` is XCR0 and is asked only where that is allowed."""
    highest, *name = cpuid(0, 0)
    vendor = b"".join(name[i].to_bytes(4, "little") for i in (0, 2, 1)).decode("ascii", errors="replace")
    states = saved_states() if cpuid(1, 0)[ECX] >> OSXSAVE & 1 else 0
    last = cpuid(7, 0)[EAX] if highest >= 7 else -1

    def has(leaf: int, subleaf: int, register: int, bit: int, needed: int) -> bool:
        known = leaf <= highest and (leaf != 7 or subleaf <= last)
        return known and states & needed == needed and bool(cpuid(leaf, subleaf)[register] >> bit & 1)

    return Processor(vendor, frozenset(name for name, where in BITS.items() if has(*where)))


@lru_cache(maxsize=1)
def processor() -> Processor:
    """The processor that this process runs on."""
    probe = _probe()
    if probe is None:
        return Processor(processor_vendor(), processor_flags() & BITS.keys())
    registers = (ctypes.c_uint32 * 4)()
    probe.anabranch_cpuid.argtypes = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    probe.anabranch_cpuid.restype, probe.anabranch_saved_states.restype = None, ctypes.c_uint64

    def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        probe.anabranch_cpuid(leaf, subleaf, registers)
        return registers[0], registers[1], registers[2], registers[3]

    return decoded(cpuid, probe.anabranch_saved_states)


def _probe() -> ctypes.CDLL | None:
    """The wheel's library that asks the processor; None without a wheel, or if it is damaged or cannot be loaded."""
    for path in recipe.PACKED.glob(f"processor-{recipe.probe_key()}-*.so"):
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() == path.stem.rpartition("-")[2]:
                return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None
