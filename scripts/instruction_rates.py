"""How many products a core starts a second: floats (FMA), pairs of bf16, and fours of bytes, 512 bits at a time.

    python scripts/instruction_rates.py

The kernels multiply bf16 in pairs only where that is not slower than as floats (``native/build.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from anabranch.native.build import compiler
from anabranch.support.processor import processor_flags, processor_name

# by the processor's flag: the instruction, and the products of one
INSTRUCTIONS = {
    "avx512f": ("vfmadd231ps", 16),
    "avx512_bf16": ("vdpbf16ps", 32),
    "avx512_vnni": ("vpdpbusd", 64),
}
CHAINS = 14  # independent sums: more than the longest latency times the instructions started in a cycle
LOOPS = 30_000_000
SOURCE = r"""
#include <chrono>
#include <cstdio>
int main() {
  long left = LOOPS;
  const auto began = std::chrono::steady_clock::now();
  asm volatile("vpxord %%zmm0, %%zmm0, %%zmm0\nvpxord %%zmm1, %%zmm1, %%zmm1\n1:\n" BODY "dec %0\njnz 1b\n"
               : "+r"(left) : : "cc", CLOBBERED);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("%.2f\n", 1e-9 * CHAINS * LOOPS / took.count());
}
"""


def rate(instruction: str, folder: Path) -> float:
    """Billions of an instruction that a core starts a second."""
    body = "".join(f'"{instruction} %%zmm0, %%zmm1, %%zmm{2 + i}\\n" ' for i in range(CHAINS))
    clobbered = ", ".join(f'"zmm{i}"' for i in range(2 + CHAINS))
    source, made = folder / "rate.cpp", folder / "rate"
    defined = {"BODY": body, "CLOBBERED": clobbered, "CHAINS": CHAINS, "LOOPS": f"{LOOPS}L"}
    source.write_text("".join(f"#define {name} {value}\n" for name, value in defined.items()) + SOURCE)
    command = compiler()
    if command is None:
        sys.exit("there is no C++ compiler; install g++, or set CXX")
    subprocess.run([*command, "-O2", "-march=native", os.fspath(source), "-o", os.fspath(made)], check=True)
    found = [float(subprocess.run([made], check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    return max(found)


def main() -> None:
    """Print a line for each instruction that the processor has."""
    print(processor_name())
    with tempfile.TemporaryDirectory() as folder:
        for flag, (instruction, products) in INSTRUCTIONS.items():
            if flag in processor_flags():
                each = rate(instruction, Path(folder))
                print(f"{instruction}: {each:.2f} G/s, {each * products:.0f} G products/s")


if __name__ == "__main__":
    main()
