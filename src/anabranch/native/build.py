"""Find the compiled kernels: those of the wheel, or compiled on first use and kept in the cache folder.

A wheel for x86-64 Linux brings libraries (``recipe.PACKAGED``), and needs no compiler. Where none fits, as in an
editable installation, a compiler on this machine makes one, once. A library's file name has a hash of its sources and
flags, and the SHA-256 of its content: truncated or damaged files and those of other versions are not
loaded. If the cache folder is not writable, the library is compiled in a temporary folder at every start. So it is if
others can write the folder: a library is code that runs with this user's rights, so one that another user may have put
there is not loaded.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
import os
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

from anabranch.native import recipe
from anabranch.native.recipe import FLAGS, INSTRUCTION_SETS, LINK, key_of, translation_unit
from anabranch.support.files import cache_home
from anabranch.support.log import LOGGER, notice
from anabranch.support.processor import processor_flags

__all__ = ["ASK_FOR_TILES", "BuildError", "Opened", "compiler", "compiler_flags", "opened"]

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): a process must request AMX tiles, since the system has to save
# 8 KB for every thread that uses them (Linux, Documentation/arch/x86/xstate.rst)
ASK_FOR_TILES = (158, 0x1023, 18)
# checks the products of a library in a separate process, since they may crash
CHECK = f"""
import ctypes, sys
ctypes.CDLL(None).syscall(*{ASK_FOR_TILES})
library = ctypes.CDLL(sys.argv[1])
library.anabranch_use_tiles(int(sys.argv[2]))
sys.exit(0 if library.anabranch_multiplies() == 1 else 1)
"""
KEPT = 16  # libraries in the cache folder; older ones are deleted
LONGEST = 300  # timeout of a compilation, and of the check of its products, in seconds
GET_A_COMPILER = "install g++, or a compiler from PyPI (pip install ziglang), or set CXX to a C++ compiler"


def compiler_flags(instruction_set: str) -> tuple[str, ...]:
    """The compiler flags of an instruction set."""
    return (*FLAGS, *INSTRUCTION_SETS[instruction_set][1])


class BuildError(Exception):
    """The kernels for an instruction set are not available."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.why, self.advice = why, advice


@dataclass(frozen=True)
class Opened:
    """A loaded library.

    packed      it came with the package, and was not compiled here
    not_kept    the reason why one compiled here is not in the cache folder; empty if it is
    """

    library: ctypes.CDLL
    packed: bool = False
    not_kept: str = ""


def opened(flags: tuple[str, ...], *, tiles: bool = False) -> Opened:
    """The library for these compiler flags: from the wheel, from the cache folder, or compiled now.

    tiles  multiply in AMX tiles, which the library must have and the system grant

    Safe with concurrent processes. Raises BuildError.
    """
    library = _opened(flags, tiles)
    library.library.anabranch_use_tiles(int(tiles))
    return library


def _opened(flags: tuple[str, ...], tiles: bool) -> Opened:
    flaw = ""
    for path in sorted(recipe.PACKED.glob(f"kernels-*-{key_of(flags)}-*.so")):
        flaw = _flaw(path, tiles)
        if not flaw:
            return Opened(ctypes.CDLL(str(path)), packed=True)
    folder, key = cache_home() / "native", key_of(flags, sorted(processor_flags()))
    library = _kept(folder, key) if folder.is_dir() and not insecure(folder) else None
    if library is not None:
        return Opened(library)
    command = compiler()
    if command is None:
        if flaw:
            raise BuildError(flaw, "reinstall anabranch")
        raise BuildError("there is no C++ compiler", GET_A_COMPILER)
    notice("compiling kernels, once, about 20 s")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shared := insecure(folder):
            raise OSError(errno.EPERM, shared)
        with FileLock(folder / "compile.lock", timeout=2 * LONGEST):
            if (library := _kept(folder, key)) is not None:  # compiled by another process meanwhile
                return Opened(library)
            with tempfile.TemporaryDirectory(dir=folder) as workspace:
                made = _compile(command, flags, Path(workspace), folder, tiles)
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
        made = _compile(command, flags, Path(workspace), Path(tempfile.gettempdir()), tiles)
        try:
            return Opened(ctypes.CDLL(str(made)), not_kept=f"{folder} cannot be used ({not_kept})")
        except OSError as error:
            raise BuildError(f"the compiled kernels cannot be loaded: {error}", "") from error


def _flaw(path: Path, tiles: bool) -> str:
    """The reason why a library of the wheel cannot be used; empty if it can."""
    try:
        if not _whole(path):
            return f"{path.name} of this installation is damaged"
        if not _multiplies(path, tiles):
            return "their products are wrong on this processor"
    except OSError as error:
        return f"{path.name} of this installation cannot be read: {error.strerror}"
    return ""


def _whole(path: Path) -> bool:
    """True if a library's content has the SHA-256 in its name. Loading a truncated one would end the process."""
    return hashlib.sha256(path.read_bytes()).hexdigest() == path.stem.rpartition("-")[2]


def _multiplies(path: Path, tiles: bool) -> bool:
    """Try the products of a library in a process of its own, or at once in an application without an interpreter."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return True
    try:  # -I and -S: the check imports nothing but the standard library
        command = [sys.executable, "-I", "-S", "-c", CHECK, str(path), str(int(tiles))]
        return subprocess.run(command, check=False, timeout=LONGEST, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        return False


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
            if _whole(path):
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


def _compile(command: list[str], flags: tuple[str, ...], workspace: Path, logs: Path, tiles: bool) -> Path:
    """Compile a library in ``workspace`` and check its products. Raises BuildError, or OSError if the disk is full."""
    made, log = workspace / "kernels.so", logs / "anabranch-compile.log"
    try:
        done = subprocess.run(
            [*command, *flags, *LINK, "-o", str(made), *translation_unit()],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run ({error})", GET_A_COMPILER) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if "No space left on device" in done.stderr:
            raise OSError(28, "No space left on device")
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"status {done.returncode}")
        with suppress(OSError):
            log.write_text(f"{shlex.join(map(str, done.args))}\n\n{done.stderr}", encoding="utf-8")
        raise BuildError(f"compiling them failed: {first.strip()}", f"see {log}; try another g++, or set CXX")
    if not _multiplies(made, tiles):
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


def compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, which may include options or a launcher ("ccache g++"), or one on the path.

    Else the one in the package ``ziglang``, if that is installed.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        try:
            words = shlex.split(name or "")
        except ValueError:  # unbalanced quotes
            continue
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    if importlib.util.find_spec("ziglang") is None:
        return None
    return [sys.executable, "-m", "ziglang", "c++"]
