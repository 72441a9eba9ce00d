"""Build the wheel from a source distribution, and decode the default model from it where there is no compiler.

    python scripts/check_wheel.py              # in a fresh virtual environment, which takes a few minutes
    python scripts/check_wheel.py --keep dist  # and keep the source distribution and the wheel in this folder
    python scripts/check_wheel.py --build dist # step 1 alone, which needs no package
    python scripts/check_wheel.py --wheel dist/anabranch-VERSION-TAG.whl # steps 2 and 3

1. Builds both, and checks that the wheel has a library for each instruction set, that they need glibc 2.17 at most and
   no C++ runtime of the system, and that the source distribution has what they are compiled from.
2. Installs the wheel into a new virtual environment, whose programs are all that there is on the path.
3. Decodes with each library that this processor can run, and with none of them. The kernels must be those of the wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from anabranch.native.recipe import PACKAGE, PACKAGED, PROBE, sources

ROOT = Path(__file__).resolve().parent.parent
TAG = "manylinux_2_17_x86_64"
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "zig")
RUNTIMES = (b"libstdc++.so", b"libc++.so", b"libgcc_s.so", b"libgomp.so", b"libomp.so")
PROMPT = "Explain why the sky is blue."


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--keep", type=Path, metavar="DIR", help="copy what was built to this folder")
    how.add_argument("--build", type=Path, metavar="DIR", help="the same, without installing the wheel")
    how.add_argument("--wheel", type=Path, help="install this wheel instead of building one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel, keep = asked.wheel, asked.keep or asked.build
        if wheel is None:
            source, wheel = built(Path(folder))
            check_source(source)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                for each in (source, wheel):
                    shutil.copy(each, keep)
        check_wheel(wheel)
        if asked.build is None:
            decode(installed(wheel, Path(folder) / "venv"))


def built(folder: Path) -> tuple[Path, Path]:
    """The source distribution of this checkout, and the wheel that pip builds from it."""
    environment = folder / "hatchling"
    run(sys.executable, "-m", "venv", environment)
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", "hatchling>=1.25")
    run(environment / "bin" / "python", "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (source,) = folder.glob("*.tar.gz")
    began = time.monotonic()
    with_all = {**os.environ, "ANABRANCH_LIBRARIES": "all"}
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source, env=with_all)
    (wheel,) = folder.glob("*.whl")
    say(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB")
    say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, built in {time.monotonic() - began:.0f} s")
    return source, wheel


def check_source(source: Path) -> None:
    """The source distribution has all that a wheel is compiled from."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ["hatch_build.py", "pyproject.toml", "src/anabranch/native/exports.map"]
    needed += [f"src/anabranch/{path.relative_to(PACKAGE)}" for path in (PROBE, *sources(), *sources("h"))]
    if missing := sorted({*needed} - names):
        sys.exit(f"check_wheel: {source.name} lacks {', '.join(missing)}")


def check_wheel(wheel: Path) -> None:
    """The wheel has every library, for the platform that it names."""
    if not wheel.name.endswith(f"py3-none-{TAG}.whl"):
        sys.exit(f"check_wheel: {wheel.name} is not for {TAG}")
    found = set()
    with zipfile.ZipFile(wheel) as archive:
        for each in archive.infolist():
            if not each.filename.endswith(".so"):
                continue
            content, name = archive.read(each), Path(each.filename).name
            versions = re.findall(rb"GLIBC_([0-9.]+)", content)  # none in the one that only asks the processor
            newest = max((tuple(map(int, version.split(b"."))) for version in versions), default=())
            needs = [runtime.decode() for runtime in RUNTIMES if runtime in content]
            if newest > (2, 17) or needs:
                sys.exit(f"check_wheel: {name} needs glibc {'.'.join(map(str, newest))} {' '.join(needs)}")
            found.add(name.split("-")[1] if name.startswith("kernels-") else "processor")
            say(
                f"  {name.rpartition('-')[0]}: {each.file_size / 1e3:.0f} kB, {each.compress_size / 1e3:.0f} compressed"
            )
    if found != {*PACKAGED, "processor"}:
        sys.exit(f"check_wheel: the wheel has the libraries {', '.join(sorted(found))}")


def installed(wheel: Path, environment: Path) -> dict[str, str]:
    """Install the wheel; the environment variables of a machine with its programs and no others."""
    run(sys.executable, "-m", "venv", environment)
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel)
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "ANABRANCH_HOME", "SSL_"))}
    variables = kept | {"PATH": str(environment / "bin"), "HOME": os.environ.get("HOME", str(environment))}
    for name in COMPILERS:
        if shutil.which(name, path=variables["PATH"]):
            sys.exit(f"check_wheel: there is a {name} in the new environment")
    return variables


def decode(variables: dict[str, str]) -> None:
    """Decode with the library that is chosen, with each that this processor can run, and in PyTorch."""
    chosen = kernels(variables)
    if chosen["origin"] != "package" or chosen["why"] or chosen["compiler"]:
        sys.exit(f"check_wheel: the kernels are not the wheel's: {chosen}")
    say(f"chosen: {chosen['instruction_set']}")
    for name in ("amx", *PACKAGED, "none"):
        with_this = variables | {"ANABRANCH_KERNELS": name}
        done = anabranch(with_this, "generate", PROMPT, "--max-new-tokens", "24", "--json")
        if done.returncode:
            if "this machine lacks" not in done.stderr or name == chosen["instruction_set"]:
                sys.exit(f"check_wheel: {name}: {done.stderr}")
            say(f"  {name}: {done.stderr.splitlines()[-1]}")
            continue
        used, expected = kernels(with_this)["instruction_set"], "torch" if name == "none" else name
        if used != expected:
            sys.exit(f"check_wheel: {used} runs instead of {expected}")
        say(f"  {name}: {json.loads(done.stdout)['text'][:60]!r}")


def kernels(variables: dict[str, str]) -> dict[str, Any]:
    """The description of the kernels by ``anabranch info``."""
    done = anabranch(variables, "info", "--json")
    if done.returncode:
        sys.exit(f"check_wheel: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)["kernels"]
    return found


def anabranch(variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the installed package, in a folder without its sources."""
    command = [str(Path(variables["PATH"]) / "anabranch"), *words]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)


def run(*words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Run a command; an error ends this script."""
    subprocess.run([str(word) for word in words], cwd=cwd, env=env, check=True)


def say(what: str) -> None:
    """Print a line at once."""
    print(what, flush=True)


if __name__ == "__main__":
    main()
