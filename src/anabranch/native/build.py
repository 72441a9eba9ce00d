"""Compile the C++ kernels once per machine, and keep the library in the cache folder.

The sources are the C++ files of this folder and of each method's folder (``methods/NAME/*.cpp``), compiled as one
translation unit for an instruction set: AVX2, AVX-512, or AVX-512 with bf16 products in AMX tiles. A library's file
name has the hash of its sources, flags and processor, and the SHA-256 of its content: truncated or damaged files are
compiled again. A compiler is needed only if there is no valid file. If the cache folder is not writable, the library is
compiled in a temporary folder at every start. So it is if others can write the folder: a library is code that runs with
this user's rights, so one that another user may have put there is not loaded.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from filelock import Timeout as LockTimeout

from anabranch.errors import InputError
from anabranch.support.files import cache_home
from anabranch.support.log import LOGGER, notice
from anabranch.support.processor import processor_family, processor_flags, processor_vendor

__all__ = [
    "INSTRUCTION_SETS",
    "BuildError",
    "Opened",
    "Shortfall",
    "compiler",
    "compiler_flags",
    "digest",
    "instruction_sets",
    "opened",
    "shortfall_of",
    "sources",
    "translation_unit",
    "unfit",
]

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
AVX512 = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl"))
# required processor flags and additional compiler flags of each instruction set, the fastest first
INSTRUCTION_SETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (AVX512 | {"amx_tile", "amx_bf16"}, ("-DANABRANCH_TILES", "-mamx-tile", "-mamx-bf16")),
    "avx512": (AVX512, ()),
    "avx2": (frozenset(("avx2", "fma", "f16c")), ("-DANABRANCH_AVX2",)),
}
# Intel's processors of the generation that also has AMX take two cycles for a product of bf16 pairs (AVX512_BF16),
# in which they do four products of floats: 1.29 and 5.3 G instructions/s on a core of a Xeon without AMX (docs/log.md).
PAIRS = ("-DANABRANCH_PAIRS",)
# On Zen 5 (AMD's family 26), weights for any number of rows are prefetched into the first-level cache
# (native/simd.h), which is slower on Zen 4 (family 25) and not measured elsewhere.
PREFETCH_FIRST = ("-DANABRANCH_PREFETCH_FIRST",)
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): a process must request AMX tiles, since the system has to save
# 8 KB for every thread that uses them (Linux, Documentation/arch/x86/xstate.rst)
ASK_FOR_TILES = (158, 0x1023, 18)
# checks the products of a new library in a separate process, since they may crash
CHECK = f"""
import ctypes, sys
ctypes.CDLL(None).syscall(*{ASK_FOR_TILES})
sys.exit(0 if ctypes.CDLL(sys.argv[1]).anabranch_multiplies() == 1 else 1)
"""
KEPT = 16  # libraries in the cache folder; older ones are deleted
LONGEST = 300  # timeout of a compilation in seconds


def compiler_flags(instruction_set: str) -> tuple[str, ...]:
    """The compiler flags of an instruction set on this processor."""
    own = INSTRUCTION_SETS[instruction_set][1]
    vendor = processor_vendor()
    pairs = instruction_set == "avx512" and "avx512_bf16" in processor_flags() and vendor != "GenuineIntel"
    first = (vendor, processor_family()) == ("AuthenticAMD", "26")
    return (*FLAGS, *own, *(PAIRS if pairs else ()), *(PREFETCH_FIRST if first else ()))


def sources(kind: str = "cpp") -> list[Path]:
    """The files of this kind, "cpp" or "h": those of this folder, then those of each method."""
    return [*sorted(PACKAGE.glob(f"native/*.{kind}")), *sorted(PACKAGE.glob(f"methods/*/*.{kind}"))]


def translation_unit() -> list[str]:
    """The compiler's arguments that name all sources, as one translation unit."""
    included = [word for path in sources() for word in ("-include", str(path))]
    return ["-I", str(PACKAGE / "native"), *included, "-x", "c++", os.devnull]


@dataclass(frozen=True)
class Shortfall:
    """The reason why the kernels are not the fastest that the processor supports.

    advice      a remedy for the user; empty if there is none
    accepted    no warning is needed: the user chose the kernels, or this machine cannot run faster ones
    """

    why: str
    advice: str = ""
    accepted: bool = False


class BuildError(Exception):
    """The kernels for an instruction set are not available."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.why, self.advice = why, advice


@dataclass(frozen=True)
class Opened:
    """A loaded library, and the reason why it is not in the cache folder (empty: it is)."""

    library: ctypes.CDLL
    not_kept: str = ""


def opened(flags: tuple[str, ...]) -> Opened:
    """The library for these compiler flags, from the cache folder or compiled now. Safe with concurrent processes.

    Raises BuildError.
    """
    folder, key = cache_home() / "native", _key(flags)
    library = _kept(folder, key) if folder.is_dir() and not insecure(folder) else None
    if library is not None:
        return Opened(library)
    command = compiler()
    if command is None:
        raise BuildError("there is no C++ compiler", "install g++, or set CXX to a C++ compiler")
    notice("compiling kernels, once, about 20 s")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shared := insecure(folder):
            raise OSError(errno.EPERM, shared)
        with FileLock(folder / "compile.lock", timeout=2 * LONGEST):
            if (library := _kept(folder, key)) is not None:  # compiled by another process meanwhile
                return Opened(library)
            with tempfile.TemporaryDirectory(dir=folder) as workspace:
                made = _compile(command, flags, Path(workspace), folder)
                digest = hashlib.sha256(made.read_bytes()).hexdigest()
                made.chmod(0o700)
                made.replace(folder / f"kernels-{key}-{digest}.so")
            _remove_old(folder)
        library = _kept(folder, key)
        not_kept = "a library from it cannot be loaded"
    except (OSError, LockTimeout) as error:
        not_kept = getattr(error, "strerror", None) or str(error)
    if library is not None:
        LOGGER.info("compiled kernels are kept in %s", folder)
        return Opened(library)
    with tempfile.TemporaryDirectory(prefix="anabranch-") as workspace:
        made = _compile(command, flags, Path(workspace), Path(tempfile.gettempdir()))
        try:
            return Opened(ctypes.CDLL(str(made)), f"{folder} cannot be used ({not_kept})")
        except OSError as error:
            raise BuildError(f"the compiled kernels cannot be loaded: {error}", "") from error


def digest() -> str:
    """A digest of all sources, which identifies the kernels of a measurement."""
    files = [*sources(), *sources("h")]
    texts = [(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def _key(flags: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((digest(), flags, sorted(processor_flags()))).encode()).hexdigest()[:16]


def _kept(folder: Path, key: str) -> ctypes.CDLL | None:
    """Load a library in the cache folder whose content matches the hash in its name; damaged ones are deleted."""
    try:
        paths = sorted(folder.glob(f"kernels-{key}-*.so"))
    except OSError:
        return None
    for path in paths:
        try:
            status = path.lstat()
            writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(status.st_mode) or not _owned(status) or writable:
                continue
            if hashlib.sha256(path.read_bytes()).hexdigest() == path.stem.rpartition("-")[2]:
                return ctypes.CDLL(str(path))
            path.unlink()
        except OSError:  # unreadable, or made for another C++ runtime
            continue
    return None


def insecure(folder: Path) -> str:
    """The part of an existing folder's path that another user can write, by ssh's rules; empty if none.

    Both the folder and the target of a symbolic link count. In a folder with the sticky bit, such as /tmp, others
    cannot replace files of this user.
    """
    named = Path(os.path.abspath(folder))
    for path in dict.fromkeys((named, *named.parents, named.resolve(), *named.resolve().parents)):
        status = path.lstat()
        if not _owned(status):
            return f"{path} belongs to another user"
        if stat.S_ISLNK(status.st_mode) or (path != named.resolve() and status.st_mode & stat.S_ISVTX):
            continue
        # a user's own group, which has the user's number, has no other members
        group = status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid
        if group or status.st_mode & stat.S_IWOTH:
            return f"others can write {path}"
    return ""


def _owned(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _compile(command: list[str], flags: tuple[str, ...], workspace: Path, logs: Path) -> Path:
    """Compile a library in ``workspace`` and check its products. Raises BuildError, or OSError if the disk is full."""
    made, log = workspace / "kernels.so", logs / "anabranch-compile.log"
    try:
        done = subprocess.run(
            [*command, *flags, "-o", str(made), *translation_unit()],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run ({error})", "install g++, or set CXX") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if "No space left on device" in done.stderr:
            raise OSError(28, "No space left on device")
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"status {done.returncode}")
        with suppress(OSError):
            log.write_text(f"{shlex.join(map(str, done.args))}\n\n{done.stderr}", encoding="utf-8")
        raise BuildError(f"compiling them failed: {first.strip()}", f"see {log}; try another g++, or set CXX")
    try:
        right = subprocess.run([sys.executable, "-c", CHECK, str(made)], check=False, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        right = False
    if not right:
        raise BuildError("their products are wrong on this processor", "try another g++, or set CXX")
    return made


def _remove_old(folder: Path) -> None:
    """Delete old libraries in the cache folder, and those without a hash of their content."""

    def made_at(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:  # deleted by another process
            return 0.0

    libraries = sorted(folder.glob("kernels-*.so"), key=made_at, reverse=True)
    hashed = [path for path in libraries if path.stem.count("-") == 2]
    for path in {*libraries} - {*hashed[:KEPT]}:
        with suppress(OSError):
            path.unlink()


def unfit() -> Shortfall | None:
    """The reason why no kernels can run on this machine, or None. Raises InputError for an invalid ANABRANCH_NATIVE."""
    if _wanted() == "0":
        return Shortfall("ANABRANCH_NATIVE is 0", "unset it", accepted=True)
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} on {platform.machine()}"
        return Shortfall(f"the native kernels are for x86-64 Linux, not {here}", accepted=True)
    if not instruction_sets():
        lacking = sorted(INSTRUCTION_SETS["avx2"][0] - processor_flags())[0]
        return Shortfall(f"the native kernels need AVX2, FMA and F16C; this processor lacks {lacking}", accepted=True)
    return None


def shortfall_of(instruction_set: str, failures: dict[str, BuildError], not_kept: str) -> Shortfall | None:
    """The reason why ``instruction_set`` is not the processor's fastest, or its library not in the cache; else None.

    failures  errors of faster instruction sets
    """
    names = list(INSTRUCTION_SETS)
    for better, failed in failures.items():
        return Shortfall(f"the {instruction_set} kernels run instead of {better}: {failed.why}", failed.advice)
    if not_kept:
        advice = "set ANABRANCH_HOME to a folder that you, and nobody else, can write"
        return Shortfall(f"the native kernels are compiled again at every start: {not_kept}", advice)
    has = [name for name in names[: names.index(instruction_set)] if INSTRUCTION_SETS[name][0] <= processor_flags()]
    if not has:
        return None
    if _wanted() == instruction_set:
        return Shortfall(f"ANABRANCH_NATIVE is {instruction_set}", "unset it", accepted=True)
    if has == ["amx"] and not _tiles_granted():
        why = f"the {instruction_set} kernels run instead of amx: the system does not grant AMX tiles to this process"
        return Shortfall(why, "use Linux 5.16 or later, and a container that allows arch_prctl")
    return None


def _wanted() -> str:
    """The value of ANABRANCH_NATIVE: "0", an instruction set, or "1" for the fastest one. Raises InputError."""
    wanted = os.environ.get("ANABRANCH_NATIVE") or "1"
    if wanted not in ("0", "1", *INSTRUCTION_SETS):
        raise InputError(
            "ANABRANCH_NATIVE must be 0 (no native kernels), 1, or one of "
            f"{', '.join(INSTRUCTION_SETS)}, got {wanted!r}"
        )
    return wanted


def instruction_sets() -> list[str]:
    """The instruction sets that this process may use, the fastest first."""
    wanted, names = _wanted(), list(INSTRUCTION_SETS)
    names = names[names.index(wanted) :] if wanted in names else names
    names = [name for name in names if INSTRUCTION_SETS[name][0] <= processor_flags()]
    if "amx" in names and not _tiles_granted():
        names.remove("amx")
    return names


def _tiles_granted() -> bool:
    return bool(ctypes.CDLL(None).syscall(*ASK_FOR_TILES) == 0)


def compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, which may include options or a launcher ("ccache g++"), or one on the path."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        try:
            words = shlex.split(name or "")
        except ValueError:  # unbalanced quotes
            continue
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    return None
