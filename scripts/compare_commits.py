"""Compare the speed of two checkouts: the same prompts in turns, each checkout in a process of its own.

Every prompt is decoded by the one, then by the other, and in the opposite order next time, so that a machine that
drifts drifts for both. Reports tokens/s of each, the median and quartiles of the pairwise ratios (this checkout over
the other), and on how many prompts the tokens are the same. Greedy, batch 1. Run nothing else at the same time.

    python scripts/compare_commits.py --before ../base --data ../shared/data --suite spec_bench:60 \\
        --suite mt_bench:20 --case bf16:auto --case int4:auto --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkouts import HERE, Worker


def serve() -> None:
    """Decode what standard input asks for, with the package on the path: what a worker process does."""
    import anabranch

    settings = json.loads(sys.stdin.readline())
    answers, sys.stdout = sys.stdout, sys.stderr
    model = anabranch.load("default", **{name: settings[name] for name in ("dtype", "quantize", "drafter")})
    prompts = [model.chat_ids([{"role": "user", "content": text}]) for text in settings["prompts"]]
    model.generate(prompts[0], max_new_tokens=16)
    print(json.dumps({"drafter": model.drafter}), file=answers, flush=True)
    for line in sys.stdin:
        found = model.generate(prompts[int(line)], max_new_tokens=settings["max_new_tokens"])
        took = {"tokens": found.token_ids, "rate": found.stats.tokens_per_second, "steps": found.stats.steps}
        print(json.dumps(took), file=answers, flush=True)


def compare(case: str, args: argparse.Namespace, prompts: list[str], suites: list[str]) -> dict[str, Any]:
    """The result of a case; ``suites`` has the suite of each prompt."""
    kind, _, drafter = case.partition(":")
    quantize = "none" if kind in ("bf16", "float32") else kind
    dtype = "float32" if kind == "float32" else "auto"
    settings = {"dtype": dtype, "quantize": quantize, "drafter": drafter or "auto", "prompts": prompts}
    settings["max_new_tokens"] = args.max_new_tokens
    workers = {"before": Worker(__file__, args.before.resolve(), settings), "now": Worker(__file__, HERE, settings)}
    rates: dict[str, list[float]] = {"before": [], "now": []}
    same = 0
    for turn in range(args.repeats):
        for number in range(len(prompts)):
            order = ["before", "now"] if (number + turn) % 2 == 0 else ["now", "before"]
            found = {name: workers[name].ask(str(number)) for name in order}
            for name in order:
                rates[name].append(found[name]["rate"])
            same += found["before"]["tokens"] == found["now"]["tokens"]
    for worker in workers.values():
        worker.close()
    ratios = [now / before for before, now in zip(rates["before"], rates["now"], strict=True)]
    of_suite: dict[str, list[float]] = {}
    for suite, ratio in zip(suites * args.repeats, ratios, strict=True):
        of_suite.setdefault(suite, []).append(ratio)
    return {
        "case": case,
        "drafter": {name: worker.ready["drafter"] for name, worker in workers.items()},
        "median_tokens_per_second": {name: round(statistics.median(found), 1) for name, found in rates.items()},
        "ratio": spread(ratios),
        "by_suite": {suite: spread(found) for suite, found in of_suite.items()},
        "same_tokens": f"{same} of {len(ratios)}",
    }


def spread(ratios: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}


def commit_of(checkout: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    return done.stdout.strip()[:10]


def limited(suite: str, limit: int) -> tuple[str, int]:
    """The name of a suite and its number of prompts, from NAME or NAME:N."""
    name, _, number = suite.rpartition(":")
    return (name, int(number)) if name and number.isdigit() else (suite, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument(
        "--suite", action="append", metavar="NAME[:N]", help="prompts, at most N (default: spec_bench); repeatable"
    )
    parser.add_argument("--data", type=Path, help="folder with the suites")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each suite that has no N")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--case", action="append", help="float32, bf16, int8 or int4, a colon, and a drafter; repeatable"
    )
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.before is None:
        parser.error("give the other checkout with --before")
    import torch  # here, not at the top: a worker has another checkout's package

    from anabranch.bench.report import environment
    from anabranch.bench.suites import load_suite
    from anabranch.support.files import shown_command, write_atomically

    limits = dict(limited(suite, args.limit) for suite in args.suite or ["spec_bench"])
    loaded = [
        (name, each.text) for name, limit in limits.items() for each in load_suite(name, data=args.data, limit=limit)
    ]
    suites, prompts = [name for name, _ in loaded], [text for _, text in loaded]
    found = []
    for case in args.case or ["bf16:auto", "int4:auto"]:
        found.append(compare(case, args, prompts, suites))
        print(json.dumps(found[-1]), flush=True)
    if args.out is not None:
        record = {
            "command": shown_command(
                "python", "scripts/compare_commits.py", *sys.argv[1:], hidden=("--before", "--data")
            ),
            "commits": {"before": commit_of(args.before), "now": commit_of(HERE)},
            "environment": environment(torch.device("cpu")),
            "prompts": len(prompts),
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "cases": found,
        }
        write_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
