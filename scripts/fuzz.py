"""Break valid files at random and read them: each must load and decode, or be refused in one sentence.

    python scripts/fuzz.py --seconds 60
    python scripts/fuzz.py --seconds 600 --seed 7 --only adapters,gguf --out fuzz.json --keep findings

A case runs in a worker process with limits on time and memory. It is *accepted* where what was read can be used (a
model then decodes a few tokens), *refused* where it ends in one AnabranchError of one line. Anything else is a
*finding*: another exception, a signal, more than the time or the memory. Findings are kept with their files under
``--keep``, and the exit status is 1. The same seed gives the same cases.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HANG = 60.0  # seconds that a case may take, on a busy machine too
FIRST = 300.0  # seconds that a case of unbroken files may take: the first one compiles the kernels
MEMORY = 6 << 30  # bytes of address space beyond what a worker begins with
ROOT = Path(__file__).resolve().parents[1]
TOYS = (ROOT / "tests", ROOT / "tests" / "model")  # modules that write them
UNTOUCHED = "untouched"  # the seed of a case that breaks nothing
OUTCOMES = ("accepted", "refused", "findings")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after that many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--only", default="", help="kinds of files, separated by commas (default: all)")
    parser.add_argument("--cases", type=int, help="stop after that many cases of each kind")
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    parser.add_argument("--keep", type=Path, help="keep the files of findings here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anabranch-fuzz-") as place:
        return run(args, Path(place))


def run(args: argparse.Namespace, place: Path) -> int:
    seeds = place / "seeds"
    os.environ.update(
        ANABRANCH_FUZZ_SEEDS=str(seeds),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="critical",
    )
    os.environ["ANABRANCH_HOME"] = os.environ.get("ANABRANCH_HOME", str(place / "home"))
    sys.path[:0] = map(str, TOYS)
    import torch

    from fuzz_cases import KINDS

    torch.set_num_threads(1)
    names = args.only.split(",") if args.only else list(KINDS)
    if unknown := sorted(set(names) - set(KINDS)):
        raise SystemExit(f"error: there is no kind {unknown[0]!r}; kinds are {', '.join(KINDS)}")
    for name in {*names, "adapters", "results"}:
        (seeds / name).mkdir(parents=True)
        KINDS[name].make(seeds / name)
    counts = {name: dict.fromkeys(OUTCOMES, 0) for name in names}
    findings: list[dict[str, str]] = []
    worker, number = Worker(place), 0
    for name in names:
        outcome, words = worker.case(name, UNTOUCHED, FIRST)
        if outcome != "accepted":
            worker.stop()
            raise SystemExit(f"error: the {name} are not accepted before anything is broken: {words}")
    began = time.monotonic()  # after the kernels were compiled
    while time.monotonic() - began < args.seconds and (args.cases is None or number < args.cases):
        for name in names:
            outcome, words = worker.case(name, f"{args.seed}:{name}:{number}")
            counts[name][outcome] += 1
            if outcome == "findings":
                findings.append({"kind": name, "case": f"{args.seed}:{name}:{number}", "what": words})
                print(f"finding in {name}, case {number}: {words.strip().splitlines()[-1][:200]}", flush=True)
                if args.keep is not None:
                    keep(args.keep / f"{name}-{args.seed}-{number}", worker.folder, words)
            if number and time.monotonic() - began > args.seconds:  # every kind has a case, however busy the machine is
                break
        number += 1
    worker.stop()
    report(counts, time.monotonic() - began)
    if args.out is not None:
        record = {
            "seconds": round(time.monotonic() - began, 1),
            "seed": args.seed,
            "kinds": counts,
            "findings": findings,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if findings else 0


def keep(folder: Path, broken: Path, words: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(broken, folder)
    (folder / "finding.txt").write_text(words, encoding="utf-8")


def report(counts: dict[str, dict[str, int]], seconds: float) -> None:
    print(f"{'kind':<12}{'cases':>8}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for name, found in counts.items():
        print(f"{name:<12}{sum(found.values()):>8}" + "".join(f"{found[outcome]:>10}" for outcome in OUTCOMES))
    total = {outcome: sum(found[outcome] for found in counts.values()) for outcome in OUTCOMES}
    print(f"{'all':<12}{sum(total.values()):>8}" + "".join(f"{total[outcome]:>10}" for outcome in OUTCOMES))
    print(f"{seconds:.0f} seconds")


class Worker:
    """A forked process that runs cases one after another; a new one takes over where it ends."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "case"
        self.seeds = place / "seeds"
        self.context = multiprocessing.get_context("fork")
        self.process: Any = None

    def case(self, name: str, seed: str, limit: float | None = None) -> tuple[str, str]:
        """(outcome, words) of one case; its files are in ``folder`` until the next one."""
        limit = HANG if limit is None else limit
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.seeds / name, self.folder)
        if self.process is None:
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=work, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send((name, seed, str(self.folder)))
        try:
            if self.pipe.poll(limit):
                outcome, words = self.pipe.recv()
                return str(outcome), str(words)
            words = f"no end after {limit:.0f} seconds"
        except (EOFError, ConnectionError):
            self.process.join(5)
            words = f"the process ended with status {self.process.exitcode}"
        self.stop()
        return "findings", words

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def work(pipe: Connection) -> None:
    """Corrupt files, read them and report, in a worker process."""
    from anabranch.errors import AnabranchError
    from fuzz_cases import KINDS

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    while True:
        try:
            name, seed, folder = pipe.recv()
        except EOFError:
            return
        kind, rng = KINDS[name], random.Random(seed)
        try:
            if seed != UNTOUCHED:
                kind.spoil(Path(folder), rng)
        except Exception:
            pipe.send(("findings", "the fuzzer itself failed\n" + traceback.format_exc()))
            continue
        try:
            kind.use(Path(folder))
            outcome, words = "accepted", ""
        except AnabranchError as error:
            words = str(error)
            is_sentence = words.strip() and "\n" not in words and "Traceback" not in words and len(words) < 2000
            outcome = "refused" if is_sentence else "findings"
        except BaseException:
            outcome, words = "findings", traceback.format_exc()
        pipe.send((outcome, words))


if __name__ == "__main__":
    raise SystemExit(main())
