"""How long the kernels multiply 1,024 weights by 1 to 14 rows: nanoseconds of one core, by the weights' format.

    python scripts/product_rates.py
    python scripts/product_rates.py --form avx2
    PYTHONPATH=OTHER/src python scripts/product_rates.py    # those of another checkout

Once with weights that stay in the second-level cache, once with 46 to 150 MB that come from memory. Each number is the
fastest of nine runs, so it is what the processor can do; a pass is slower. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from anabranch.native import build

NATIVE = build.PACKAGE / "native"
SOURCE = r"""
#include <chrono>
#include <cstdio>

#include "interface.h"
#include "pass.h"

constexpr int WIDTH = 576, ROWS = 14;

template <class P>
double nanoseconds(int rows, const P* x, const Packed& w, int repeats) {
  Workspace memory;
  void* buffer = conversion_buffer<P>(memory, rows, w);
  Runner runner(1);
  std::vector<float> y(static_cast<size_t>(rows) * static_cast<size_t>(w.outputs));
  double best = 1e9;
  for (int turn = 0; turn < 9; ++turn) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i)
      runner.pool.run([&](int thread) {
        multiply_converted(runner.pool, x, rows, w, buffer, thread, [&](int m, int b, F32x16 low, F32x16 high) {
          store_outputs(y.data() + static_cast<int64_t>(m) * w.outputs + b * BLOCK, BLOCK, low, high);
        });
      });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    best = std::min(best, took.count() / repeats / w.blocks() / (WIDTH / BLOCK) * 1e9);
  }
  return best;
}

int main() {
  std::vector<bf16> x(ROWS * WIDTH);
  for (size_t i = 0; i < x.size(); ++i) x[i] = to_bf16(static_cast<float>(i * 37 % 2001) / 1000.0f - 1.0f);
  const char* names[] = {"bf16", "float32", "int8", "int4", "compact"};
  for (int kind : {BF16, COMPACT, INT8, INT4})
    for (int large : {0, 1}) {
      Packed w{nullptr, (large ? 4000 : 16) * BLOCK, WIDTH, kind};
      Workspace memory;
      const int64_t size = w.blocks() * w.block_bytes();
      char* data = memory.of<char>(size + PREFETCH_BYTES);
      for (int64_t i = 0; i < size; ++i) data[i] = static_cast<char>(0x34 + (i & 3));  // valid in every format
      w.data = data;
      for (int rows = 0; rows <= ROWS; ++rows) {  // the first one only warms the caches up
        const double took = nanoseconds(std::max(rows, 1), x.data(), w, large ? 1 : 250);
        if (rows > 0) std::printf("%s %d %d %.1f\n", names[kind], large, rows, took);
      }
    }
}
"""


def measured(form: str) -> dict[str, dict[str, list[float]]]:
    """Nanoseconds by format and place of the weights, for 1, 2, ... rows."""
    command = build.compiler()
    if command is None:
        sys.exit("there is no C++ compiler; install g++, or set CXX")
    flags = [flag for flag in build.compiler_flags(form) if flag not in ("-shared", "-fPIC")]
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "rates.cpp", Path(folder) / "rates"
        source.write_text(SOURCE)
        subprocess.run(
            [*command, *flags, "-I", os.fspath(NATIVE), os.fspath(source), "-o", os.fspath(made)], check=True
        )
        lines = subprocess.run([made], check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, dict[str, list[float]]] = {}
    for name, large, _, took in map(str.split, lines):
        found.setdefault(name, {}).setdefault("memory" if large == "1" else "cache", []).append(float(took))
    return found


def main() -> None:
    """Print a line for each format and place of the weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--form", choices=tuple(build.INSTRUCTION_SETS), help="of the kernels (default: the fastest)")
    args = parser.parse_args()
    forms = build.instruction_sets()
    form = args.form or (forms[0] if forms else "")
    if form not in forms:
        sys.exit(f"this processor cannot run the kernels{' in the form ' + form if form else ''}")
    for name, places in measured(form).items():
        for place, took in places.items():
            print(f"{name:8s} {place:7s}", *(f"{each:6.1f}" for each in took))


if __name__ == "__main__":
    main()
