"""Compare kernels of the wheel's compiler with those of a compiler on this machine, in turns, each in a process.

Measured are passes through a model of the default model's sizes with random weights, in every format (see
``compare_passes.py``), products with weights as GGUF files store them, and decoding with the default model. Reports the
median of the pairwise ratios of speed (the wheel's over the other's; higher is better for the wheel), and whether
results are the same to the bit. Run nothing else at the same time.

    python scripts/check_wheel.py --keep dist
    python scripts/compare_compilers.py --wheel dist/*.whl --cxx "g++ -march=native" --out benchmarks/NAME.json
    python scripts/compare_compilers.py --wheel dist/*.whl --cxx "g++ -march=x86-64-v3" --kernels avx2 --formats int4
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkouts import HERE, Worker, in_turns
from compare_passes import FORMATS, SHAPES, passes_of

STORED = ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
STORED_ROWS = (1, 8, 32)
OUTPUTS, WIDTH = 3072, 2048
DRAFTERS = ("none", "streams:tree=8")
PROMPTS = ("Explain why the sky is blue.", "Write a Python function that returns the prime factors of a number.")
TOKENS = 64
LONG = "1x8 after 4096"  # attention takes most of this pass


def serve() -> None:
    """Time what standard input names: what a worker process does."""
    settings = json.loads(sys.stdin.readline())
    from anabranch.native import library, recipe

    recipe.PACKED = Path(settings["packed"])
    kernels = library.library()
    if kernels is None or library.packed() != settings["from_wheel"]:
        raise SystemExit(f"other kernels than expected: {library.shortfall()}")
    runs = RUNS[settings["what"]](settings)
    print(json.dumps({"kernels": kernels.instruction_set}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            run, digest, times = *runs[line.strip()], []
            for _ in range(settings["passes"]):
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            print(json.dumps({"ms": statistics.median(times) * 1e3, "digest": digest()}), flush=True)


Run = tuple[Callable[[], object], Callable[[], str]]  # what is timed, and a digest of its results


def passes(settings: dict[str, Any]) -> dict[str, Run]:
    """Passes in one format."""
    found = passes_of(settings["format"], list(SHAPES), 256)
    return found | {LONG: passes_of(settings["format"], ["1x8"], 4096)["1x8"]}


def products(settings: dict[str, Any]) -> dict[str, Run]:
    """Products of 1, 8 and 32 rows with a weight as a GGUF file stores it."""
    sys.path.insert(0, str(HERE / "tests"))
    from anabranch.native.arguments import STORED_TYPES
    from anabranch.native.library import library
    from stored_rows import raw_rows

    kernels, kind = library(), STORED_TYPES[settings["format"]]
    packed, memory = kernels.stored([kind] * (OUTPUTS // 32), OUTPUTS, WIDTH)
    assert kernels.pack_stored(packed, 0, kind, raw_rows(settings["format"], OUTPUTS, WIDTH))

    def product(rows: int) -> Run:
        torch.manual_seed(rows)
        x = torch.randn(rows, WIDTH).bfloat16()

        def run() -> None:
            for _ in range(10):
                kernels.linear(x, packed, None)

        return run, lambda: hashlib.sha256(
            kernels.linear(x, packed, None).numpy().tobytes() + bytes(len(memory) > 0)
        ).hexdigest()

    return {f"{rows} rows": product(rows) for rows in STORED_ROWS}


def decoding(settings: dict[str, Any]) -> dict[str, Run]:
    """Greedy decoding with the default model."""
    import anabranch

    model = anabranch.load("default", quantize=settings["format"])

    def generation(drafter: str) -> Run:
        said: list[list[int]] = []

        def run() -> None:
            said[:] = [
                model.generate(prompt, max_new_tokens=TOKENS, drafter=drafter, temperature=0).token_ids
                for prompt in PROMPTS
            ]

        return run, lambda: hashlib.sha256(repr(said).encode()).hexdigest()

    return {drafter: generation(drafter) for drafter in DRAFTERS}


RUNS = {"passes": passes, "products": products, "decoding": decoding}


def compare(what: str, kind: str, sides: dict[str, tuple[Path, dict[str, str]]], args: argparse.Namespace) -> list[Any]:
    """All cases of one format."""
    settings = {"what": what, "format": kind, "passes": 2 if what == "decoding" else args.passes}
    workers = {
        name: Worker(
            __file__, HERE, settings | {"packed": str(packed), "from_wheel": name == "wheel"}, environment=environment
        )
        for name, (packed, environment) in sides.items()
    }
    cases = {"passes": (*SHAPES, LONG), "products": [f"{rows} rows" for rows in STORED_ROWS], "decoding": DRAFTERS}
    found = []
    for case in cases[what]:
        summary = in_turns(workers, case, args.repeats)
        found.append({"what": what, "format": kind, "case": case, "speed": summary.pop("ratio")} | summary)
        print(json.dumps(found[-1]), flush=True)
    for worker in workers.values():
        worker.close()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wheel", type=Path, help="a wheel of this checkout")
    parser.add_argument("--cxx", default="g++ -march=native", help="the other compiler, as CXX")
    parser.add_argument("--home", type=Path, metavar="DIR", help="keep what the other compiler makes in this folder")
    parser.add_argument("--kernels", default="", help="the instruction set; by default the one that is chosen")
    parser.add_argument("--formats", default=",".join((*FORMATS, *STORED, "decoding")), help="what to measure")
    parser.add_argument("--passes", type=int, default=8, help="timed passes in a turn, of which the median counts")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each case")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file; cases are added to it")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.wheel is None:
        parser.error("give a wheel with --wheel")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    if args.out is not None:
        write(args, found)


def measure(args: argparse.Namespace, folder: Path) -> list[Any]:
    """All formats; the libraries of the wheel, and those compiled here, are in ``folder``."""
    from anabranch.support.files import cache_home

    with zipfile.ZipFile(args.wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".so")])
    home = (args.home or folder / "home").resolve()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "models").exists():
        (home / "models").symlink_to(cache_home() / "models")  # the default model
    shared = {"ANABRANCH_KERNELS": args.kernels, "ANABRANCH_HOME": str(home)}
    sides = {
        "other": (folder / "none", {**shared, "CXX": args.cxx}),
        "wheel": (folder / "anabranch" / "native" / "libraries", shared),
    }
    found = []
    for kind in args.formats.split(","):
        what = "decoding" if kind == "decoding" else "products" if kind in STORED else "passes"
        for each in ("none", "int4") if what == "decoding" else (kind,):
            found += compare(what, each, sides, args)
    return found


def write(args: argparse.Namespace, found: list[Any]) -> None:
    """Add cases to the result file."""
    from anabranch.bench.report import environment
    from anabranch.support.files import shown_command, write_atomically

    record: dict[str, Any] = {"environment": environment(torch.device("cpu")), "compilers": []}
    if args.out.exists():
        record = json.loads(args.out.read_text(encoding="utf-8"))
    command = shown_command("python", "scripts/compare_compilers.py", *sys.argv[1:], hidden=("--home",))
    about = {"command": command, "other": args.cxx, "passes": args.passes, "repeats": args.repeats}
    record["compilers"].append(about | {"cases": found})
    write_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
