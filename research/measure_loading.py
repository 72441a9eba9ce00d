"""Measure seconds to load a GGUF file, peak memory and the rate of plain decoding, each load in a process of its own.

    python research/measure_loading.py FILE.gguf ... --out benchmarks/loading.json

    first     as stored, packed and kept in the cache directory (entries of the file are removed before)
    second    as stored, mapped from the cache directory
    uncached  as stored, packed and not kept
    none      dequantised to bf16

Peak memory is the high-water mark of the resident set, torch and transformers included, of which the shares after the
imports and after loading are listed too. Pages of mapped files count.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

MODES = {
    "first": {"quantize": "auto"},
    "second": {"quantize": "auto"},
    "uncached": {"quantize": "auto", "cache": False},
    "none": {"quantize": "none"},
}
PROMPT = "Write a function that returns the n-th Fibonacci number, and explain it."


def peak_mb() -> int:
    """The high-water mark of this process's resident set, in 10^6 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6)


def measured(file: Path, mode: str, tokens: int) -> dict[str, Any]:
    """Load and decode in this process."""
    began = time.perf_counter()
    import anabranch
    from anabranch.model.load import load_target  # noqa: F401 - imports torch and transformers

    imported, imported_mb = time.perf_counter() - began, peak_mb()
    began = time.perf_counter()
    model = anabranch.load(str(file), drafter="none", **MODES[mode])
    loaded, loaded_mb = time.perf_counter() - began, peak_mb()
    rates = []
    for _ in range(2):
        result = model.generate(PROMPT, max_new_tokens=tokens) if tokens else None
        rates.append(0.0 if result is None else result.stats.decode_tokens_per_second)
    return {
        "quantize": model.target.quantize,
        "import_s": round(imported, 2),
        "load_s": round(loaded, 2),
        "imported_mb": imported_mb,
        "loaded_mb": loaded_mb,
        "peak_mb": peak_mb(),
        "tokens_per_s": round(max(rates), 1),
    }


def main() -> None:
    """Measure all modes of all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--tokens", type=int, default=64, help="decode this many tokens; 0: only load")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.files[0], options.child, options.tokens)))
        return
    from anabranch.support.files import cache_home

    results = []
    for file in options.files:
        size = sum(part.stat().st_size for part in [file])
        record: dict[str, Any] = {"file": file.name, "file_mb": round(size / 1e6)}
        for mode in options.modes:
            if mode == "first":
                for entry in (cache_home() / "packed").glob(f"{file.stem}-*"):
                    entry.unlink()
            command = [sys.executable, __file__, str(file), "--child", mode, "--tokens", str(options.tokens)]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            record[mode] = json.loads(run.stdout.splitlines()[-1])
            record[mode]["peak_of_file"] = round(record[mode]["peak_mb"] / record["file_mb"], 2)
            print(file.name, mode, record[mode], flush=True)
        results.append(record)
    if options.out is not None:
        described = {"date": str(date.today()), "machine": platform.processor() or platform.machine()}
        options.out.write_text(json.dumps({**described, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
