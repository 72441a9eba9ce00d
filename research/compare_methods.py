"""Compare trained methods, and methods that need no training, on the same prompts, node budgets and target.

    research/train_methods answers.jsonl ADAPTERS
    python research/compare_methods.py --data DIR --adapters ADAPTERS --out benchmarks/methods-MACHINE-DATE.json

For each method: parameters, bytes, data and training time from its adapter folder; acceptance by task and by depth,
greedy and at temperature 1; the cost of a step by part; tokens/s against plain decoding, alternating, one prompt and
several at a time, for each kind of weights; and whether ``anabranch certify`` finds its tokens equal to plain
decoding's in float32. An adapter's folder that has a tuned target in it is measured against that target's plain
decoding. A label may have settings, as in eagle-1:tree=static=FOLDER, which all drafters of the row keep. The result is
written after each part; --resume continues a stopped run. Run nothing else at the same time.
``python research/comparison_page.py`` turns the newest result into docs/comparison.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from anabranch.bench.machine import measure_machine
from anabranch.bench.report import environment
from anabranch.bench.run import FAILURES, Encoded, describe
from anabranch.bench.suites import SuitePrompt, load_suite
from anabranch.errors import AnabranchError
from anabranch.loading import LoadConfig, Loaded, load
from anabranch.methods import Spec
from anabranch.model.load import Target
from anabranch.prompts import chat_ids
from anabranch.support.files import check_writable, shown_command, without_folders
from case_parts import certificate, one_row, several_rows
from cases import (
    LOAD,
    Case,
    adapter_cases,
    contenders,
    facts,
    free_cases,
    in_folder,
    opened,
    rejection_spec,
    unique,
)
from parts import Parts

SCHEMA = 1
FREE = ("prompt_lookup", "suffix", "lookahead")
TOGETHER = 2.5  # times the tokens/s of one row that several rows are taken to reach, for the estimate
Part = tuple[str, Callable[[], Any]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="LABEL=FOLDER",
        help="a trained method; repeatable. A label may have settings, as in eagle-1:tree=static=FOLDER",
    )
    add("--adapters", type=Path, metavar="FOLDER", help="all trained methods in this folder, labelled by their folders")
    add("--method", action="append", metavar="SPEC", help=f"a method without adapter (default: {', '.join(FREE)})")
    add("--model", default="default", help="the target")
    add("--dtype", default="auto", help="the target's type, except where it is certified")
    add("--weights", nargs="+", default=["none", "int4"], help="kinds of weights: none, int8, int4; auto: as stored")
    add("--suite", default="spec_bench", help="prompts")
    add("--data", type=Path, help="folder with the suites")
    add("--limit", type=int, default=12, help="prompts decoded one at a time, spread over the tasks")
    add("--sampled-limit", type=int, help="of these, prompts that are sampled too (default: all)")
    add("--max-new-tokens", type=int, default=64)
    add("--budgets", type=int, nargs="+", default=[8, 16], help="nodes of a draft, the root included")
    add("--rows", type=int, default=8, help="prompts decoded at a time, where throughput is measured")
    add("--rows-limit", type=int, default=16, help="prompts for throughput")
    add("--repeats", type=int, default=3, help="runs of throughput")
    add("--certify-limit", type=int, default=6, help="prompts that are certified")
    add("--certify-tokens", type=int, default=32, help="new tokens of those")
    add("--certify-rows", type=int, nargs="+", default=[1, 4], help="numbers of rows at which they are certified")
    add("--only", default="", metavar="PART", help="measure the parts whose names begin so, as in '1 row'")
    add("--out", type=Path, required=True, help="write the result to this JSON file")
    add("--resume", action="store_true", help="continue a stopped run, or add methods to a result")
    add("--force", action="store_true", help="replace an existing result")
    return parser.parse_args()


class Comparison:
    """The prompts, targets and sizes of a run, and the parts that it measures of each method."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        asked = args.suite, args.data
        self.suite = load_suite(asked[0], data=asked[1], limit=args.limit)
        self.sampled = load_suite(asked[0], data=asked[1], limit=args.sampled_limit or args.limit)
        self.together = load_suite(asked[0], data=asked[1], limit=args.rows_limit)
        self.warm = load_suite("own", limit=1)[0]
        self.target = lru_cache(maxsize=4)(self._target)
        self._ids = lru_cache(maxsize=None)(self._encode)

    def _target(self, model: str, dtype: str, weights: str) -> Target:
        return load(LoadConfig(model, dtype=dtype, quantize=weights), adapters=False).target

    def _encode(self, prompt: SuitePrompt) -> list[int]:
        target = self.target(self.args.model, self.args.dtype, self.args.weights[0])
        ids: list[int] = chat_ids(target.tokenizer, prompt.text, model=target.name)
        return ids

    def encoded(self, suite: Sequence[SuitePrompt]) -> list[Encoded]:
        return [(prompt, self._ids(prompt)) for prompt in suite]

    def settings(self) -> dict[str, Any]:
        """The settings that must be equal to continue a run."""
        args = self.args
        target = self.target(args.model, args.dtype, args.weights[0])
        ids = [self._ids(prompt) for prompt in (*self.suite, *self.sampled, *self.together)]
        sizes = ("weights", "limit", "max_new_tokens", "budgets", "rows", "rows_limit", "repeats")
        return {
            "schema": SCHEMA,
            "command": _command(),
            "model": without_folders(args.model),
            "fingerprint": target.fingerprint,
            "dtype": str(target.decoder.dtype).removeprefix("torch."),
            "suite": Path(args.suite).name,
            "prompts_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            "tasks": [prompt.task for prompt in self.suite],
            "sampled_tasks": [prompt.task for prompt in self.sampled],
            **{name: getattr(args, name) for name in (*sizes, "certify_limit", "certify_tokens", "certify_rows")},
        }

    def loaded(self, case: Case, weights: str, dtype: str | None = None) -> Loaded:
        model = self.args.model if case.tuned is None else str(case.tuned)
        return opened(case, self.target(model, dtype or self.args.dtype, weights))

    def parts(self, case: Case, report: Callable[[str], None]) -> Iterator[Part]:
        """The parts of a method by name, each with the function that measures it."""
        args, specs = self.args, contenders(case, self.args.budgets)
        fixed = {name: spec for name, spec in specs.items() if name != LOAD}
        new = {"max_new_tokens": args.max_new_tokens, "report": report}
        together = [self._ids(prompt) for prompt in self.together]

        def sampled() -> Any:
            loaded = self.loaded(case, args.weights[0])
            chain = rejection_spec(case, loaded)
            tried = fixed if chain is None else {**fixed, "rejection": chain}
            return one_row(
                loaded,
                tried,
                self.encoded(self.sampled),
                self._ids(self.warm),
                sampling={"temperature": 1.0},
                rejection=("rejection",),
                **new,
            )

        def proved() -> Any:
            spec, sizes = list(fixed.values())[-1], {"rows": args.certify_rows, "max_new_tokens": args.certify_tokens}
            asked = together[: args.certify_limit]
            return certificate(self.loaded(case, "none", "float32"), spec, asked, report=report, **sizes)

        for weights in args.weights:
            yield (
                f"1 row, {weights}",
                lambda weights=weights: one_row(
                    self.loaded(case, weights), specs, self.encoded(self.suite), self._ids(self.warm), **new
                ),
            )
        yield "sampled", sampled
        for weights in args.weights:
            yield (
                f"{args.rows} rows, {weights}",
                lambda weights=weights: several_rows(
                    self.loaded(case, weights), few(specs), together, rows=args.rows, repeats=args.repeats, **new
                ),
            )
        yield "certificate", proved

    def estimate(self, cases: Sequence[Case]) -> float:
        """Seconds that the run may take, if every drafter decodes as fast as plain decoding."""
        args, warm = self.args, (self.warm, self._ids(self.warm))
        certified = ("none", "float32")
        kinds = [(weights, args.dtype) for weights in args.weights]
        rates = {}
        for weights, dtype in kinds if args.only else [*kinds, certified]:
            target = Loaded(self.target(args.model, dtype, weights), ())
            (record,) = one_row(target, {}, [warm], warm[1], max_new_tokens=min(32, args.max_new_tokens))
            rates[weights, dtype] = record["tokens_per_second"]
        alone, together = args.limit * args.max_new_tokens, args.rows_limit * args.max_new_tokens * args.repeats
        seconds = 0.0
        for case in cases:
            specs = contenders(case, args.budgets)
            for weights in args.weights:
                rate = rates[weights, args.dtype]
                seconds += (1 + len(specs)) * alone / rate + (1 + len(few(specs))) * together / (TOGETHER * rate)
            seconds += (1 + len(specs)) * len(self.sampled) * args.max_new_tokens / rates[args.weights[0], args.dtype]
            if certified in rates:
                seconds += 2 * len(args.certify_rows) * args.certify_limit * args.certify_tokens / rates[certified]
        return seconds


def few(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """The drafters for throughput: the smallest budget, and what follows the load."""
    smallest = next(name for name in specs if name != LOAD)
    return {name: spec for name, spec in specs.items() if name in (smallest, LOAD)}


def _command() -> str:
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--force")]
    return shown_command("python", "research/compare_methods.py", *words, hidden=("--data",))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """One line that is overwritten; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:78]}", end="", file=sys.stderr, flush=True)


def start(comparison: Comparison, args: argparse.Namespace, cases: Sequence[Case]) -> Parts:
    """The result file, new or continued."""
    settings = comparison.settings()
    settings["methods"] = [[case.name, case.method.name] for case in cases]
    target = comparison.target(args.model, args.dtype, args.weights[0])
    where = environment(target.decoder.device)
    if args.resume:
        result = Parts.resume(args.out, settings)
        commits = dict.fromkeys([*result.header["environment"]["commit"].split(" then "), where["commit"]])
        result.header["environment"]["commit"] = " then ".join(commits)
        return result
    say("measuring the machine: memory bandwidth and matrix rate")
    machine = measure_machine(target.decoder).to_dict()
    return Parts(args.out, {"kind": "methods", "run": settings, "environment": where, "machine": machine}, [])


def measure(comparison: Comparison, case: Case, result: Parts) -> None:
    """Measure the missing parts of a method; a part that fails is recorded as failed."""
    record = result.of(case.name)
    if "facts" not in record:
        loaded = comparison.loaded(case, comparison.args.weights[0])
        record |= {"method": case.method.name, "tuned": case.tuned is not None}
        record |= {"facts": facts(case, loaded.target), "seconds": {}, "parts": {}}
    for name, work in comparison.parts(case, lambda what: progress(f"{case.name}: {what}")):
        if not name.startswith(comparison.args.only):
            continue
        if name in record["parts"] and "error" not in record["parts"][name]:  # failed parts are tried again
            continue
        began = time.perf_counter()
        try:
            record["parts"][name] = work()
        except FAILURES as error:
            record["parts"][name] = {"error": describe(error)}
            say(f"{case.name}, {name}: not measured: {describe(error)}")
        record["seconds"][name] = round(time.perf_counter() - began, 1)
        result.write()


def main() -> None:
    args = parse()
    try:
        Parts.check(args.out, resume=args.resume, force=args.force)
        check_writable(args.out)
        free = FREE if args.method is None else [spec for spec in args.method if spec]
        trained = [*args.adapter, *(() if args.adapters is None else in_folder(args.adapters))]
        cases = unique([*adapter_cases(trained), *free_cases(free)])
        comparison = Comparison(args)
        result = start(comparison, args, cases)
        left = [case for case in cases if len(result.of(case.name).get("parts", ())) == 0]
        say(f"{len(cases)} methods; about {comparison.estimate(left) / 60:.0f} minutes, if drafts gain nothing")
        began = time.perf_counter()
        for number, case in enumerate(cases, 1):
            measure(comparison, case, result)
            passed = (time.perf_counter() - began) / 60
            say(f"{case.name} done, {number} of {len(cases)}, after {passed:.1f} minutes")
    except AnabranchError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; the same command with --resume continues {args.out}") from None
    result.write(complete=True)
    say(f"wrote {args.out}")


if __name__ == "__main__":
    main()
