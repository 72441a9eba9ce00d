"""Choose an instruction set: the fastest that processor and system support, or the one in ANABRANCH_KERNELS."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass

from anabranch.errors import InputError
from anabranch.native.build import ASK_FOR_TILES, BuildError
from anabranch.native.features import processor
from anabranch.native.recipe import INSTRUCTION_SETS, preferred

__all__ = ["Shortfall", "forced", "instruction_sets", "shortfall_of", "unfit"]

SETTING = "ANABRANCH_KERNELS"
OFF = "none"


@dataclass(frozen=True)
class Shortfall:
    """The reason why the kernels are not the fastest that the processor supports.

    advice      a remedy for the user; empty if there is none
    accepted    no warning is needed: the user chose the kernels, or this machine cannot run faster ones
    """

    why: str
    advice: str = ""
    accepted: bool = False


def _wanted() -> str:
    """The value of ANABRANCH_KERNELS: "none", an instruction set, or empty. Raises InputError."""
    wanted = os.environ.get(SETTING, "")
    if wanted and wanted != OFF and wanted not in INSTRUCTION_SETS:
        raise InputError(f"{SETTING} must be {OFF} or one of {', '.join(INSTRUCTION_SETS)}, got {wanted!r}")
    return wanted


def forced() -> str:
    """The instruction set that the user requires; empty if they leave the choice. Raises InputError."""
    wanted = _wanted()
    return "" if wanted == OFF else wanted


def unfit() -> Shortfall | None:
    """The reason why no kernels can run on this machine, or None.

    Raises InputError for an invalid ANABRANCH_KERNELS, and for one that requires kernels which cannot run here.
    """
    if _wanted() == OFF:
        return Shortfall(f"{SETTING} is {OFF}", "unset it", accepted=True)
    lacking = ""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        lacking = f"the native kernels are for x86-64 Linux, not {platform.system()} on {platform.machine()}"
    elif missing := INSTRUCTION_SETS["avx2"][0] - processor().features:
        lacking = f"the native kernels need AVX2, FMA, F16C and BMI; this processor lacks {min(missing)}"
    if lacking and forced():
        raise InputError(f"{SETTING} is {forced()}, but {lacking}; unset it")
    return Shortfall(lacking, accepted=True) if lacking else None


def instruction_sets() -> list[str]:
    """The instruction sets that this process may use, the fastest first: all supported ones, or the required one.

    Raises InputError if the required one is not supported.
    """
    found = processor()
    supported = [name for name, (needed, _) in INSTRUCTION_SETS.items() if needed <= found.features]
    if "amx" in supported and not _tiles_granted():
        supported.remove("amx")
    if wanted := forced():
        if wanted not in supported:
            missing = ", ".join(sorted(INSTRUCTION_SETS[wanted][0] - found.features)) or "AMX tiles for a process"
            instead = f"use one of {', '.join(supported)}, or unset it"
            raise InputError(f"{SETTING} is {wanted}, but this machine lacks {missing}; {instead}")
        return [wanted]
    return [name for name in preferred(found.features, found.vendor) if name in supported]


def shortfall_of(instruction_set: str, failures: dict[str, BuildError], not_kept: str) -> Shortfall | None:
    """The reason why ``instruction_set`` is not the processor's fastest, or its library not in the cache; else None.

    failures  errors of faster instruction sets
    """
    for better, failed in failures.items():
        return Shortfall(f"the {instruction_set} kernels run instead of {better}: {failed.why}", failed.advice)
    if not_kept:
        advice = "set ANABRANCH_HOME to a folder that you, and nobody else, can write"
        return Shortfall(f"the native kernels are compiled again at every start: {not_kept}", advice)
    if forced():
        return Shortfall(f"{SETTING} is {instruction_set}", "unset it", accepted=True)
    if INSTRUCTION_SETS["amx"][0] <= processor().features and not _tiles_granted():
        why = f"the {instruction_set} kernels run instead of amx: the system does not grant AMX tiles to this process"
        return Shortfall(why, "use Linux 5.16 or later, and a container that allows arch_prctl")
    return None


def _tiles_granted() -> bool:
    return bool(ctypes.CDLL(None).syscall(*ASK_FOR_TILES) == 0)
