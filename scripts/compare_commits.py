"""Compare the speed of two checkouts: the same prompts in turns, each checkout in a process of its own.

Every prompt is decoded by the one, then by the other, and in the opposite order next time, so that a machine that
drifts drifts for both. Reports tokens/s of each, the median and quartiles of the pairwise ratios (this checkout over
the other), and on how many prompts the tokens are the same. Greedy, batch 1. Run nothing else at the same time.

    python scripts/compare_commits.py --before ../base --data ../shared/data --suite spec_bench:60 \\
        --suite mt_bench:20 --case bf16:auto --case int4:auto --out benchmarks/NAME.json

With --tokens it compares tokens instead of speed, for every drafter at hand, greedy and seeded, in float32 and bf16, at
1 and 8 rows. *Matching* gives the tokens of plain decoding for every drafter and number of rows, so its tokens are
compared with the other checkout's plain decoding of one row. *Rejection* is compared with the same combination there.
It prints one line for each combination, and returns 1 if any differs. The tokens are kept in --out as JSON lines: a run
that was interrupted continues, and a commit is decoded once.

    python scripts/compare_commits.py --tokens --before ../base --data ../shared/data --suite spec_bench:60 \\
        --out tokens.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkouts import HERE, Worker

TOKENS = 32  # new tokens of a prompt where only tokens are compared
PREFIXES = 2**31  # bytes there for keys and values of the prompts, which are read once and not for every drafter
DRAFTERS = (
    "none",
    "prompt_lookup",
    "prompt_lookup:matches=3",
    "suffix:nodes=8",
    "lookahead",
    "draft_model",
    "draft_model:tree=chain",
    "staged",
    "streams:tree=8",
    "streams:tree=8,copy=yes",
    "streams:tree=chain",
    "streams:tree=product,k=2",
    "streams+prompt_lookup",
    "quantized_draft",
    "streams:tree=8+quantized_draft:tokens=1",
    "auto",
)
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SAMPLED,
    "rejection": {**SAMPLED, "rule": "rejection"},
}
Combination = tuple[str, int, tuple[str, str]]  # dtype, rows, drafter and mode
REJECTING = ("draft_model:tree=chain", "streams:tree=chain", "streams:tree=product,k=2")


def serve() -> None:
    """Decode what standard input asks for, with the package on the path: what a worker process does."""
    import anabranch

    settings = json.loads(sys.stdin.readline())
    answers, sys.stdout = sys.stdout, sys.stderr
    loras = {"given": settings["lora"]} if settings.get("lora") else {}
    options = {name: settings[name] for name in ("dtype", "quantize", "drafter", "adapter")}
    model = anabranch.load(settings["model"], **options, loras=loras)
    prompts = [model.chat_ids([{"role": "user", "content": text}]) for text in settings["prompts"]]
    if settings["drafter"] is None:
        if hasattr(model, "keep_prefixes"):  # older commits lack it
            model.keep_prefixes(memory=PREFIXES)
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_tokens(model, prompts, json.loads(line))), file=answers, flush=True)
        return
    chosen = {"lora": next(iter(loras), None)}
    model.generate(prompts[0], max_new_tokens=16, **chosen)
    print(json.dumps({"drafter": model.drafter}), file=answers, flush=True)
    for line in sys.stdin:
        found = model.generate(prompts[int(line)], max_new_tokens=settings["max_new_tokens"], **chosen)
        took = {"tokens": found.token_ids, "rate": found.stats.tokens_per_second, "steps": found.stats.steps}
        print(json.dumps(took), file=answers, flush=True)


def _tokens(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """The new tokens of all prompts, or why these options are refused."""
    from anabranch.errors import AnabranchError

    try:
        return {"tokens": [answer.token_ids for answer in model.generate(prompts, **options)]}
    except AnabranchError as error:
        return {"refused": str(error)}


def compare_tokens(args: argparse.Namespace, prompts: list[str]) -> bool:
    """Decode with both checkouts whatever --out lacks, and report each combination; whether all are the same."""
    drafters, new = args.drafter or DRAFTERS, args.max_new_tokens or TOKENS
    modes = [(drafter, mode) for drafter in drafters for mode in ("greedy", "seeded")]
    modes += [(drafter, "rejection") for drafter in drafters if drafter in REJECTING]
    combinations = list(itertools.product(args.dtype or ("float32", "bf16"), args.rows or (1, 8), modes))
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    if args.out.exists():
        kept = {tuple(key): answer for key, answer in map(json.loads, args.out.read_text().splitlines())}

    def key(commit: str, combination: Combination) -> tuple[Any, ...]:
        dtype, rows, (drafter, mode) = combination
        return commit, dtype, rows, drafter, mode, new, len(prompts)

    def decode(checkout: Path, wanted: Iterable[Combination]) -> dict[Combination, dict[str, Any]]:
        """The answers of a checkout, from --out as far as they are there."""
        commit = commit_of(checkout)
        missing = [each for each in wanted if key(commit, each) not in kept]
        for dtype, group in itertools.groupby(missing, key=lambda each: each[0]):
            settings: dict[str, Any] = {"dtype": "float32" if dtype == "float32" else "auto", "quantize": "none"}
            settings |= {"model": "default", "drafter": None, "adapter": args.adapter, "prompts": prompts}
            worker = Worker(__file__, checkout, settings)
            for each in group:
                _, rows, (drafter, mode) = each
                options = {"drafter": drafter, "rows": rows, "max_new_tokens": new, **MODES[mode]}
                kept[key(commit, each)] = worker.ask(json.dumps(options))
                with args.out.open("a") as out:
                    out.write(json.dumps([key(commit, each), kept[key(commit, each)]]) + "\n")
                print(f"{commit}: {dtype}, {rows} rows, {drafter}, {mode}", file=sys.stderr, flush=True)
            worker.close()
        return {each: kept[key(commit, each)] for each in wanted}

    now = decode(HERE, combinations)
    references = {each: _reference(each, now[each]) for each in combinations}
    before = decode(args.before.resolve(), dict.fromkeys(references.values()))
    verdicts = {each: _verdict(before[references[each]], now[each]) for each in combinations}
    for (dtype, rows, (drafter, mode)), verdict in verdicts.items():
        print(f"{dtype:8} {rows} rows {mode:9} {drafter}: {verdict}", flush=True)
    return not any("DIFFERENT" in verdict for verdict in verdicts.values())


def _reference(combination: Combination, now: dict[str, Any]) -> Combination:
    """The combination of the other checkout that has to have the same tokens, or to be refused as well."""
    dtype, _, (_, mode) = combination
    own = mode == "rejection" or "refused" in now
    return combination if own else (dtype, 1, ("none", mode))


def _verdict(before: dict[str, Any], now: dict[str, Any]) -> str:
    refused = ["refused" in answer for answer in (before, now)]
    if all(refused):
        return f"both refuse: {now['refused']}"
    if any(refused):
        return f"DIFFERENT: refused, {(before | now)['refused']}"
    pairs = list(zip(before["tokens"], now["tokens"], strict=True))
    differing = [number for number, (theirs, ours) in enumerate(pairs) if theirs != ours]
    return f"DIFFERENT on prompts {differing}" if differing else f"{len(pairs)} of {len(pairs)} the same"


def compare(case: str, args: argparse.Namespace, prompts: list[str], suites: list[str]) -> dict[str, Any]:
    """The result of a case; ``suites`` has the suite of each prompt."""
    kind, _, drafter = case.partition(":")
    quantize = {"bf16": "none", "float32": "none", "stored": "auto"}.get(kind, kind)
    dtype = "float32" if kind == "float32" else "auto"
    settings = {"dtype": dtype, "quantize": quantize, "drafter": drafter or "auto", "prompts": prompts}
    settings |= {"model": args.model, "max_new_tokens": args.max_new_tokens or 128, "adapter": args.adapter}
    settings["lora"] = args.lora
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
    parser.add_argument("--model", default="default", help="without --tokens: the target")
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument(
        "--suite", action="append", metavar="NAME[:N]", help="prompts, at most N (default: spec_bench); repeatable"
    )
    parser.add_argument("--data", type=Path, help="folder with the suites")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each suite that has no N")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each prompt")
    parser.add_argument("--max-new-tokens", type=int, help=f"default: 128, with --tokens {TOKENS}")
    parser.add_argument("--adapter", action="append", help="adapter folder instead of the shipped one; repeatable")
    parser.add_argument("--lora", help="without --tokens: a LoRA folder that every request chooses (loras=)")
    parser.add_argument("--tokens", action="store_true", help="compare tokens only")
    parser.add_argument("--drafter", action="append", help="with --tokens: one of the drafters; repeatable")
    parser.add_argument("--dtype", action="append", choices=("float32", "bf16"), help="with --tokens; repeatable")
    parser.add_argument("--rows", action="append", type=int, help="with --tokens; repeatable (default: 1 and 8)")
    parser.add_argument(
        "--case", action="append", help="float32, bf16, int8, int4 or stored, a colon, and a drafter; repeatable"
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
    if args.tokens:
        if args.out is None:
            parser.error("--tokens needs --out for the tokens")
        sys.exit(0 if compare_tokens(args, prompts) else 1)
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
            "max_new_tokens": args.max_new_tokens or 128,
            "repeats": args.repeats,
            "cases": found,
        }
        write_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
