"""Memory of one process that changes its drafter often and reads long prompts.

One model decodes a short prompt with each of 30 drafter specifications, then ``--long`` prompts of ``--length``
tokens. After each call, freed memory is returned to the system, and what the process still holds is read. (What malloc
keeps for later allocations is not held: it took up to 8% more after the fourth long prompt than after the first, and
then no more.) Buffers are as large as the widest pass and the longest text so far, and are kept. So the widest drafts
come first, then one that follows the load: for the first of these, passes are timed, which left 1 to 31 MB behind,
once. Growth over the specifications is the last reading over that one, and growth over the long prompts is their last
reading over their first. More than LIMIT means that calls leave memory behind.

    python scripts/memory_growth.py --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import anabranch
from anabranch.bench.report import environment
from anabranch.bench.suites import load_suite
from anabranch.errors import FileError, InputError
from anabranch.support.files import check_writable, shown_command, write_atomically
from anabranch.support.memory import give_back

LIMIT = 1.05  # of the first reading of the same kind
SPECIFICATIONS = (
    "streams:tree=32+prompt_lookup",
    "streams:tree=auto,nodes=32+prompt_lookup",
    *(f"streams:tree={n}" for n in (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)),
    *(f"streams:tree={n}+prompt_lookup" for n in (3, 4, 6, 8, 12, 16)),
    *(f"streams:tree={n},threshold=0.05" for n in (8, 16, 32)),
    *(f"streams:tree=auto,nodes={n}" for n in (8, 16)),
    "streams:tree=chain",
    "streams:tree=12,depth=2",
    "streams:tree=12,condition=no",
    "prompt_lookup",
    "prompt_lookup:tokens=3",
    "none",
)
FIRST = 1  # the first of these that the others are compared with


def resident_mb() -> float:
    """The resident memory of this process, without what malloc keeps for later, in 10^6 bytes (Linux)."""
    give_back()
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise FileError(f"this system does not report resident memory in /proc ({error.strerror})") from error
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return round(int(sizes["VmRSS"][0]) * 1024 / 1e6, 1)


def long_prompt(tokenizer: object, length: int, number: int) -> list[int]:
    """``length`` token ids of the prompts that come with the package, each prompt number begun at another one."""
    texts = [prompt.text for prompt in load_suite("own", limit=12)]
    start = number % len(texts)
    ids: list[int] = tokenizer.encode("\n\n".join(texts[start:] + texts[:start]))  # type: ignore[attr-defined]
    return (ids * -(-length // len(ids)))[:length]


def measure(model: anabranch.Model, *, new: int, long: int, length: int) -> list[tuple[str, float]]:
    """Megabytes held after each call, named after what the call did."""
    readings = []
    for spec in SPECIFICATIONS:
        model.generate("Explain how a river carves its valley.", max_new_tokens=new, drafter=spec)
        readings.append((spec, resident_mb()))
    for number in range(long):
        ids = long_prompt(model.tokenizer, length, number)
        model.generate(ids, max_new_tokens=new, drafter=SPECIFICATIONS[number])
        readings.append((f"prompt of {len(ids)} tokens", resident_mb()))
    return readings


def growth(readings: list[tuple[str, float]]) -> float:
    """The last reading over the first."""
    return round(readings[-1][1] / readings[0][1], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--new", type=int, default=24, help="new tokens a call")
    parser.add_argument("--long", type=int, default=10, help="long prompts after the specifications")
    parser.add_argument("--length", type=int, default=4000, help="tokens of a long prompt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if min(args.new, args.length) < 1 or args.long < 0:
        raise InputError("--new and --length must be at least 1, and --long at least 0")
    if args.out is not None:
        check_writable(args.out)
    model = anabranch.load(
        args.model, dtype=args.dtype, quantize=args.quantize, device="cpu", drafter=SPECIFICATIONS[0]
    )
    loaded = resident_mb()
    readings = measure(model, new=args.new, long=args.long, length=args.length)
    print(f"{loaded:8.1f} MB  loaded")
    for name, held in readings:
        print(f"{held:8.1f} MB  {name}")
    grown = {"specifications": growth(readings[FIRST : len(SPECIFICATIONS)])}
    if args.long:
        grown["long_prompts"] = growth(readings[len(SPECIFICATIONS) :])
    for name, ratio in grown.items():
        print(f"{name.replace('_', ' ')}: last over first {ratio:.3f} (limit {LIMIT})")
    result = {
        "command": shown_command("python", *sys.argv),
        "environment": environment(model.target.decoder.device),
        "loaded_mb": loaded,
        "held_mb": readings,
        "last_over_first": grown,
        "limit": LIMIT,
    }
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    if max(grown.values()) > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
