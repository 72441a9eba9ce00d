"""Run the native kernels under the compiler's sanitizers; a compiler warning or a finding is a failure.

    python scripts/sanitize.py              # everything, in both forms that the processor has
    python scripts/sanitize.py --no-tests   # steps 1 and 3, which need filelock and platformdirs alone
    python scripts/sanitize.py --tests      # step 2; arguments of pytest may follow, such as -k products

1. Compiles each form with -Wall -Wextra -Werror, by g++ and, where it is installed, clang++.
2. Runs the tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in the best form and in AVX2's;
   those of the boundary and of encoder-decoders in the best one.
3. Runs ``tests/native/race.cpp``, the kernels' thread pool and products, under ThreadSanitizer.

This file is also the pytest plugin that adds the sanitizers to the kernels' flags.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from anabranch.native import build, recipe
from anabranch.native.selection import instruction_sets

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "src" / "anabranch" / "native"
WARN = ("-Wall", "-Wextra", "-Werror")
# -O1 and line numbers keep reports readable and compiling short; two more options of GCC shorten it by 30 %
ADDRESS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-inline-functions-called-once", "-fira-region=one")
ADDRESS += ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# those of all kernels in every form, the others in the best one: what they add does not depend on the form
FILES = [f"tests/{name}.py" for name in ("native/test_kernels", "native/test_boundary", "model/test_encoder_decoder")]
# without the tests that decode whole texts or draw many trees, which take minutes and touch the same code
CHOSEN = ["-x", "-k", "not says_the_same and not bit and not torch-"]
# the interpreter is not built for AddressSanitizer: what it keeps until it ends is no leak of the kernels
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

if "ANABRANCH_SANITIZED" in os.environ:  # in pytest
    build.FLAGS = (*build.FLAGS, *ADDRESS)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-tests", action="store_true", help="compilers' warnings and the threads alone")
    only.add_argument("--tests", nargs=argparse.REMAINDER, help="the tests alone, with these arguments of pytest")
    asked = parser.parse_args()
    compilers = [name for name in ("g++", "clang++") if _found(name)]
    if not compilers:
        sys.exit("sanitize: there is no g++ and no clang++")
    forms = instruction_sets()
    if not forms:
        sys.exit("sanitize: this processor cannot run the kernels")
    if asked.tests is None:
        for compiler in compilers:
            for form in dict.fromkeys((*forms, "avx2", "amx")):
                _say(f"{compiler} {' '.join(WARN)}, {form}")
                # uninitialised values are found while optimising; g++ 12 finds some in its own AVX-512 header
                how = ("-O2", "-c", "-o", os.devnull) if form == "avx2" else ("-fsyntax-only",)
                command = [compiler, *build.compiler_flags(form), *WARN, *how]
                subprocess.run([*command, *recipe.translation_unit()], check=True)
        _races(compilers[0], forms)
    if asked.no_tests:
        return
    for form in dict.fromkeys((forms[0], forms[-1])):
        _say(f"AddressSanitizer and UndefinedBehaviorSanitizer, {form}")
        _tests(form, asked.tests or [*(FILES if form == forms[0] else FILES[:1]), *CHOSEN])


def _tests(form: str, tests: list[str]) -> None:
    """The native tests with kernels that watch memory."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            **os.environ,
            **OPTIONS,
            "LD_PRELOAD": " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so")),
            "ANABRANCH_SANITIZED": "1",
            "ANABRANCH_KERNELS": form,
            "ANABRANCH_HOME": home,
            "CXX": "env -u LD_PRELOAD g++",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "scripts"), os.environ.get("PYTHONPATH", ""))),
        }
        command = [sys.executable, "-m", "pytest", "-p", "sanitize", "-p", "no:cacheprovider", "--capture=sys", *tests]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


def _races(compiler: str, forms: list[str]) -> None:
    """The pool under ThreadSanitizer."""
    for form in dict.fromkeys((forms[0], forms[-1])):
        _say(f"ThreadSanitizer, {form}")
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "race"
            command = [compiler, *build.compiler_flags(form), "-O1", "-g1", "-fsanitize=thread", f"-I{NATIVE}"]
            subprocess.run([*command, "-o", made, ROOT / "tests" / "native" / "race.cpp"], check=True)
            subprocess.run([made], env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}, check=True)


def _runtime(name: str) -> str:
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())


def _found(name: str) -> bool:
    try:
        return subprocess.run([name, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _say(what: str) -> None:
    print(f"== {what}", flush=True)


if __name__ == "__main__":
    main()
