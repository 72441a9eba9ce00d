"""Finding, compiling and keeping the kernels, on this machine's own compiler and cache folders."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_kernels import BASE, decoder, needs_kernels

from anabranch.errors import InputError
from anabranch.methods.streams.kernels import DraftConfig, TrailEntry
from anabranch.model.pack import pack_decoder
from anabranch.native import build, recipe, selection, structs
from anabranch.native import library as native
from anabranch.native.features import Processor

# an early form, compiled quickly
QUICK = (*build.FLAGS, "-O0", *recipe.INSTRUCTION_SETS["avx2"][1])
NO_HEADER = "/no/such.h"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for these tests: that of the installed package, or one that is compiled once."""
    ready = next(recipe.PACKED.glob(f"kernels-avx2-{recipe.key_of(build.compiler_flags('avx2'))}-*.so"), None)
    if ready is not None:
        return ready
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    home = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANABRANCH_HOME", str(home))
        build.opened(QUICK)
    (path,) = kept(home)
    return path


@pytest.fixture
def quick(compiled: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that delivers at once, as $CXX, or fails without a header; the file where it notes its calls."""
    asked, script = tmp_path / "asked", tmp_path / "quick"
    script.write_text(
        f'#!/bin/sh\necho "$1" >> "{asked}"\n'
        f'case "$*" in *{NO_HEADER}*) echo "fatal error: {NO_HEADER}: No such file" >&2; exit 1;; esac\n'
        f'while [ "$1" != -o ]; do shift; done\nexec cp "{compiled}" "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} first")
    return asked


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, a package without libraries, and kernels that are compiled quickly."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    monkeypatch.setattr(recipe, "PACKED", tmp_path / "libraries")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    native.forget()
    yield tmp_path
    native.forget()


def kept(home: Path) -> list[Path]:
    return sorted((home / "native").glob("kernels-*.so"))


def no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    empty = folder / "nothing here"
    empty.mkdir(exist_ok=True)
    patch.delenv("CXX", raising=False)
    patch.setenv("PATH", str(empty))
    patch.setitem(sys.modules, "ziglang", None)


def test_reasons_for_having_no_kernels(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, another processor, a compiler that fails: the reason is kept and PyTorch decodes."""
    model = decoder(BASE)
    broken = tmp_path / "broken compiler"
    broken.write_text(
        "#!/bin/sh\necho interface.cpp:1: note: in a file >&2\necho interface.cpp:7: error: ice >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    for change, why, advice in (
        (lambda m: m.setenv("ANABRANCH_KERNELS", "none"), "ANABRANCH_KERNELS is none", "unset it"),
        (lambda m: no_compiler(m, tmp_path), "there is no C++ compiler", "install g++"),
        (lambda m: m.setattr(selection, "processor", lambda: Processor("", frozenset())), "processor lacks avx2", ""),
        (lambda m: m.setattr(selection.platform, "machine", lambda: "riscv64"), "not Linux on riscv64", ""),
        (lambda m: m.setenv("CXX", f"'{broken}'"), "interface.cpp:7: error: ice", "anabranch-compile.log"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            native.forget()
            assert native.library() is None
            assert why in native.why_not()
            found = native.shortfall()
            assert advice in found.advice
            other = copy.deepcopy(model)
            pack_decoder(other)
            assert other.backend.kernels is None
    log = (home / "native" / "anabranch-compile.log").read_text()
    assert str(broken) in log.splitlines()[0]
    assert "note: in a file" in log


@pytest.mark.thorough
@needs_kernels
def test_compiled_once(home: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a compiler of several words; a second start needs none."""
    build.opened(QUICK)
    assert quick.read_text() == "first\n"
    (path,) = kept(home)
    assert path.stem.endswith(hashlib.sha256(path.read_bytes()).hexdigest())
    made = path.stat()
    no_compiler(monkeypatch, tmp_path)
    assert build.opened(QUICK).not_kept == ""
    assert path.stat() == made
    assert quick.read_text() == "first\n"


@needs_kernels
@pytest.mark.thorough
@pytest.mark.parametrize("damage", [lambda whole: whole[:300_000], lambda whole: os.urandom(len(whole))])
def test_a_damaged_library_is_compiled_again(damage: object, home: Path, quick: Path) -> None:
    """Loading one that was cut ends the process with a bus error."""
    build.opened(QUICK)
    (path,) = kept(home)
    whole = path.read_bytes()
    path.unlink()  # it is mapped into this process
    path.write_bytes(damage(whole))
    code = f"from anabranch.native import build\nprint(build.opened({QUICK!r}).library.anabranch_multiplies())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    (path,) = kept(home)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in path.name


@needs_kernels
def test_a_damaged_library_without_a_compiler(
    home: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build.opened(QUICK)
    (path,) = kept(home)
    path.unlink()
    path.write_bytes(b"cut")
    no_compiler(monkeypatch, tmp_path)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.opened(QUICK)


@needs_kernels
def test_a_cache_that_cannot_be_kept(home: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A temporary folder does, which leaves nothing behind."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "file"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(temporary))
    assert native.library() is not None
    found = native.shortfall()
    assert "compiled again at every start" in found.why
    assert "ANABRANCH_HOME" in found.advice
    assert list(temporary.iterdir()) == []


def _links(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize(
    ("spoil", "advised"),
    [
        (lambda home, file: file.chmod(0o777), False),
        (lambda home, file: file.chmod(0o720), False),
        (lambda home, file: _links(file), False),
        (lambda home, file: file.parent.chmod(0o777), True),
        (lambda home, file: home.chmod(0o777), True),
        pytest.param(
            lambda home, file: os.chown(file, 12345, 12345),
            False,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
        pytest.param(
            lambda home, file: os.chown(file.parent, 12345, 12345),
            True,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_libraries_that_others_can_write_are_not_loaded(
    spoil: Callable[[Path, Path], None], advised: bool, home: Path, quick: Path
) -> None:
    build.opened(QUICK)
    (file,) = kept(home)
    before = quick.read_text().count("\n")
    spoil(home, file)
    opened = build.opened(QUICK)
    assert quick.read_text().count("\n") > before, "the library of others was loaded"
    assert bool(opened.not_kept) == advised
    if advised:
        assert "others can write" in opened.not_kept or "another user" in opened.not_kept


def test_a_sticky_folder_above_is_no_harm(home: Path, quick: Path) -> None:
    home.mkdir(exist_ok=True)
    home.chmod(0o1777)
    assert not build.opened(QUICK).not_kept
    before = quick.read_text()
    assert not build.opened(QUICK).not_kept
    assert quick.read_text() == before


def test_sources_of_methods_are_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method brings C++ of its own by putting it into its folder; every file counts for the library's name."""
    ours = [path.relative_to(recipe.PACKAGE).as_posix() for path in (*recipe.sources(), *recipe.sources("h"))]
    assert {"native/interface.cpp", "native/simd.h", "methods/streams/streams.cpp", "methods/streams/draft.h"} <= {
        *ours
    }
    monkeypatch.setattr(recipe, "PACKAGE", tmp_path)
    files = ["native/interface.cpp", "methods/streams/streams.cpp", "methods/zigzag/zigzag.cpp", "methods/zigzag/own.h"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    arguments, keys = recipe.translation_unit(), [recipe.key_of(QUICK)]
    assert [arguments[i + 1] for i, word in enumerate(arguments) if word == "-include"] == [
        str(tmp_path / name) for name in files[:3]
    ]
    for name in files:
        (tmp_path / name).write_text("// changed")
        keys.append(recipe.key_of(QUICK))
    (tmp_path / files[2]).rename(tmp_path / "methods/zigzag/other.cpp")
    keys.append(recipe.key_of(QUICK))
    assert len({*keys}) == len(keys)


def test_a_compiler_that_is_no_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    usual = build.compiler()
    for named in ("'", "no-such-compiler -O3", " "):
        monkeypatch.setenv("CXX", named)
        assert build.compiler() == usual


@needs_kernels
def test_old_libraries_are_removed(home: Path, quick: Path) -> None:
    folder = home / "native"
    folder.mkdir()
    for i in range(build.KEPT + 3):
        old = folder / f"kernels-{i:016x}-{i:064x}.so"
        old.write_bytes(b"")
        os.utime(old, (i, i))
    (folder / "kernels-0123456789abcdef.so").write_bytes(b"")  # of versions that kept no hash
    build.opened(QUICK)
    assert len(kept(home)) == build.KEPT
    assert not (folder / "kernels-0123456789abcdef.so").exists()
    assert not (folder / f"kernels-{0:016x}-{0:064x}.so").exists()


@pytest.mark.thorough
@needs_kernels
def test_threads_and_processes_compile_once(home: Path, quick: Path) -> None:
    code = f"from anabranch.native import build; build.FLAGS = {build.FLAGS!r}\n"
    code += "from anabranch.native import library; assert library.library() is not None"
    other = subprocess.Popen([sys.executable, "-c", code])
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(native.library())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.wait(timeout=600) == 0
    assert found[0] is found[1]
    assert found[0] is not None
    assert quick.read_text() == "first\n"


@pytest.mark.thorough
def test_structs_have_the_sizes_and_fields_that_the_compiler_sees(tmp_path: Path) -> None:
    if (command := build.compiler()) is None:
        pytest.skip("there is no compiler")
    mirrored = [each for each in vars(structs).values() if isinstance(each, type(structs.Packed))]
    checks = []
    for each in (*mirrored, DraftConfig, TrailEntry):
        checks.append(f"static_assert(sizeof({each.__name__}) == {ctypes.sizeof(each)});")
        for name, _ in each._fields_:
            checks.append(f"static_assert(offsetof({each.__name__}, {name}) == {getattr(each, name).offset});")
    assert len(checks) > 100
    source = tmp_path / "checks.cpp"
    headers = ("<cstddef>", '"rider.h"', '"trail.h"', '"draft.h"')
    source.write_text("\n".join((*(f"#include {header}" for header in headers), *checks)))
    folders = [word for name in ("native", "methods/streams") for word in ("-I", str(recipe.PACKAGE / name))]
    flags = build.compiler_flags("avx2")
    subprocess.run([*command, *flags, "-fsyntax-only", *folders, str(source)], check=True)


@needs_kernels
def test_a_slower_instruction_set(home: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = recipe.INSTRUCTION_SETS
    best = selection.instruction_sets()[0]
    if best == "avx2":
        pytest.skip("this processor has nothing better than AVX2")
    monkeypatch.setitem(sets, best, (sets[best][0], (*sets[best][1], "-include", NO_HEADER)))
    kernels, found = native.library(), native.shortfall()
    assert kernels is not None
    assert kernels.instruction_set != best
    assert f"instead of {best}" in found.why
    assert NO_HEADER in found.why
    assert not found.accepted
    monkeypatch.setenv("ANABRANCH_KERNELS", best)
    native.forget()
    with pytest.raises(InputError, match=rf"ANABRANCH_KERNELS is {best}, but compiling them failed.*{NO_HEADER}"):
        native.library()
    monkeypatch.setenv("ANABRANCH_KERNELS", "avx2")
    native.forget()
    found = native.shortfall()
    assert found.accepted
    assert found.why == "ANABRANCH_KERNELS is avx2"


@pytest.fixture
def wheel(compiled: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of a package that has one, which is for AVX2."""
    monkeypatch.setenv("ANABRANCH_KERNELS", "avx2")
    recipe.PACKED.mkdir()
    key = recipe.key_of(build.compiler_flags("avx2"))
    path = recipe.PACKED / f"kernels-avx2-{key}-{hashlib.sha256(compiled.read_bytes()).hexdigest()}.so"
    shutil.copy(compiled, path)
    return path


@needs_kernels
def test_a_library_of_the_wheel(wheel: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs no compiler and writes nothing, whoever else may write the folder."""
    no_compiler(monkeypatch, tmp_path)
    wheel.parent.chmod(0o777)
    assert native.library().instruction_set == "avx2"
    assert native.packed()
    assert not (home / "native").exists()


@needs_kernels
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged; reinstall anabranch"),
        (lambda path: path.write_bytes(b""), "is damaged; reinstall anabranch"),
        (lambda path: replace_by_a_folder(path), "cannot be read: Is a directory; reinstall anabranch"),
        # which a process of its own tries, and another the one that is compiled instead
        pytest.param(
            *(lambda path: rename(path, b"no library"), "their products are wrong on this processor"),
            marks=pytest.mark.thorough,
        ),
        (lambda path: path.rename(path.with_name(path.name.replace("-avx2-", "-avx2-0"))), "there is no C"),
    ],
    ids=["truncated", "empty", "a folder", "not a library", "of other sources"],
)
def test_a_library_of_the_wheel_that_cannot_be_used(
    spoil: Callable[[Path], object], why: str, wheel: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One sentence without a compiler; with one it is compiled, and nothing is said."""
    spoil(wheel)
    with monkeypatch.context() as patch:
        no_compiler(patch, tmp_path)
        with pytest.raises(InputError, match=f"ANABRANCH_KERNELS is avx2, but .*{why}"):
            native.library()
    assert native.library().instruction_set == "avx2"
    assert not native.packed()
    assert native.shortfall().accepted


@needs_kernels
@pytest.mark.thorough
def test_processes_that_use_the_wheel_at_once(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_compiler(monkeypatch, tmp_path)
    code = "from pathlib import Path\nfrom anabranch.native import build, library, recipe\n"
    code += f"recipe.PACKED = Path({str(wheel.parent)!r}); build.FLAGS = {build.FLAGS!r}\nassert library.packed()"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [each.wait(timeout=300) for each in started] == [0, 0]


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rename(path: Path, content: bytes) -> None:
    """Another content, whose hash is the one in the name."""
    path.unlink()
    stem = path.stem.rpartition("-")[0]
    path.with_name(f"{stem}-{hashlib.sha256(content).hexdigest()}.so").write_bytes(content)
