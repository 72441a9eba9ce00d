"""Compile the native kernels into a wheel for x86-64 Linux; hatchling runs this when it builds one.

``ziglang``, a C++ compiler from PyPI, makes the libraries that ``native/recipe.py`` lists. They need glibc 2.17 or
later and no C++ runtime. By default they are those for this machine's processor, and avx2's; with
``ANABRANCH_LIBRARIES=all`` the wheel has those for all machines. Elsewhere, and in an editable installation, the wheel
has no libraries: a compiler on the user's machine makes one on first use, or PyTorch runs the model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src" / "anabranch" / "native"
TARGET = ("-target", "x86_64-linux-gnu.2.17", "-g0")  # Zig's compiler writes debug information unless told otherwise
# Sources in the compiler's package of those parts of the C++ runtime that the kernels use: exceptions, memory and
# thread-local variables. Compiling all of libc++, as Zig does to link it, takes longer than a library.
ABI = (
    *("abort_message", "cxa_aux_runtime", "cxa_default_handlers", "cxa_exception", "cxa_exception_storage"),
    *("cxa_guard", "cxa_handlers", "cxa_personality", "cxa_thread_atexit", "cxa_virtual", "fallback_malloc"),
    *("private_typeinfo", "stdlib_exception", "stdlib_new_delete", "stdlib_stdexcept", "stdlib_typeinfo"),
)
RUNTIME = (
    *(f"libcxxabi/src/{name}.cpp" for name in ABI),
    *(f"libcxx/src/{name}.cpp" for name in ("algorithm", "new_helpers", "stdexcept")),
)
RUNTIME_FLAGS = ("-O2", "-std=c++23", "-fPIC", "-fvisibility=hidden", "-w", "-D_LIBCPP_BUILDING_LIBRARY")
RUNTIME_FLAGS += ("-D_LIBCXXABI_BUILDING_LIBRARY", "-DLIBCXXABI_NON_DEMANGLING_TERMINATE")
SETTING = "ANABRANCH_LIBRARIES"
# an index takes no wheel with the second tag, which is right: its libraries are those for one processor
PORTABLE, LOCAL = "py3-none-manylinux_2_17_x86_64", "py3-none-linux_x86_64"


class KernelsHook(BuildHookInterface[Any]):
    """Adds compiled kernels to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, and tag the wheel for the platform that they run on."""
        wanted = os.environ.get(SETTING, "")
        if wanted not in ("", "all"):
            raise SystemExit(f"{SETTING} must be all or unset, got {wanted!r}")
        if version == "editable" or not _here():
            return
        # kept until ``finalize``: hatchling reads the files after this returns
        self._folder = tempfile.TemporaryDirectory(prefix="anabranch-kernels-")
        self.app.display_waiting("compiling the native kernels, about a minute")
        recipe = _recipe()
        names = recipe.PACKAGED if wanted else recipe.libraries_for(*_processor())
        for path in Compiler(Path(self._folder.name), recipe).libraries(names):
            build_data["force_include"][str(path)] = f"anabranch/native/libraries/{path.name}"
        build_data["pure_python"], build_data["tag"] = False, PORTABLE if names == recipe.PACKAGED else LOCAL

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the compiler's files."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _here() -> bool:
    """True where such a wheel can be installed: elsewhere pip would refuse it."""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64") and platform.libc_ver()[0] == "glibc"


def _processor() -> tuple[list[str], str]:
    """The features and the vendor of this machine's processor, as Linux names them; no features if it does not."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return [], ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return fields.get("flags", "").split(), fields.get("vendor_id", "")


def _recipe() -> ModuleType:
    """``native/recipe.py`` without the package around it, whose dependencies are not installed here."""
    spec = importlib.util.spec_from_file_location("recipe", NATIVE / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Compiler:
    """The compiler, which works in ``folder`` and leaves nothing elsewhere."""

    def __init__(self, folder: Path, recipe: ModuleType) -> None:
        package = importlib.util.find_spec("ziglang")
        if package is None or package.origin is None:
            raise SystemExit(
                "the package ziglang, which compiles the native kernels, is not installed; build without "
                "--no-build-isolation, or install it as pyproject.toml pins it"
            )
        self.zig, self.folder, self.recipe = str(Path(package.origin).with_name("zig")), folder, recipe
        cache = str(folder / "cache")
        self.environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}

    def libraries(self, names: tuple[str, ...]) -> list[Path]:
        """The libraries of these instruction sets, and the one that asks the processor for its features."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = {name: pool.submit(self._kernels, name) for name in names}  # first: they take the longest
            runtime, probe = pool.submit(self._runtime), pool.submit(self._probe)
            linked = {name: self._link(name, of.result(), runtime.result()) for name, of in objects.items()}
        made = [self._named(path, f"kernels-{name}-{self._key(name)}") for name, path in linked.items()]
        return [*made, self._named(probe.result(), f"processor-{self.recipe.probe_key()}")]

    def _flags(self, name: str) -> tuple[str, ...]:
        return (*self.recipe.FLAGS, *self.recipe.INSTRUCTION_SETS[name][1])

    def _key(self, name: str) -> str:
        return str(self.recipe.key_of(self._flags(name)))

    def _kernels(self, name: str) -> Path:
        # Clang calls registers of 512 bits a feature of its own, which Zig turns off unless it is named
        wide = ("-mevex512",) if "-mavx512f" in self._flags(name) else ()
        return self._object(name, (*self._flags(name), *wide), tuple(self.recipe.translation_unit()))

    def _runtime(self) -> Path:
        library = Path(self.zig).with_name("lib")
        folders = [word for name in ("libcxxabi", "libcxx") for word in ("-I", str(library / name / "src"))]
        included = [word for name in RUNTIME for word in ("-include", str(library / name))]
        return self._object("runtime", RUNTIME_FLAGS, (*folders, *included, "-x", "c++", os.devnull))

    def _object(self, name: str, flags: tuple[str, ...], sources: tuple[str, ...]) -> Path:
        made = self.folder / f"{name}.o"
        self._run("c++", *flags, "-c", "-o", str(made), *sources)
        return made

    def _link(self, name: str, *objects: Path) -> Path:
        # As C, without libc++. -s: symbols of the C++ runtime and of the kernels are of no use without a debugger
        library = self.folder / f"{name}.so"
        defined = ("-s", "-Wl,--gc-sections", "-Wl,-z,defs")
        self._run("cc", "-O2", *self.recipe.LINK, *defined, "-o", str(library), *map(str, objects), "-lunwind")
        return library

    def _probe(self) -> Path:
        library = self.folder / "processor.so"
        self._run("cc", "-O2", "-shared", "-fPIC", "-s", "-o", str(library), str(self.recipe.PROBE))
        return library

    def _run(self, language: str, *words: str) -> None:
        command = [self.zig, language, *TARGET, *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"compiling the native kernels failed: {' '.join(command)}\n{done.stderr}")

    def _named(self, library: Path, stem: str) -> Path:
        """Rename a library so that its name tells its content."""
        return library.rename(library.with_name(f"{stem}-{hashlib.sha256(library.read_bytes()).hexdigest()}.so"))
