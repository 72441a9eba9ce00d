"""Run a study of the papers: what one of their figures or tables shows, at this machine's size.

    python research/study.py --list
    python research/study.py cosine --data DIR --out benchmarks/study-cosine-MACHINE-DATE.json

A study of several parts writes each when it is measured, into OUT.parts, so that the same command continues a stopped
run. Studies use the adapter that ships for the target, or those given with --adapter. Those of speed need a quiet
machine.
``python research/reproduction_page.py`` turns the newest result of each into docs/reproduction.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.report import environment
from anabranch.bench.shapes import ROUNDS
from anabranch.errors import AnabranchError, InputError
from anabranch.support.files import check_output, check_writable, shown_command, write_atomically
from anabranch.support.jsonfiles import read_json
from anabranch.support.processor import set_threads
from benchmark_tables import table
from studies import STUDIES
from studies.base import Setup, Study

MEASURED = {study.name: study for study in STUDIES if study.measure is not None}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("study", nargs="?", choices=list(MEASURED), metavar="NAME", help="the study to run")
    add("--list", action="store_true", help="list the studies and exit")
    add("--model", default="default", help="the target")
    add("--dtype", default="", help="the target's type (default: the study's own)")
    add("--adapter", action="append", default=[], metavar="[LABEL=]FOLDER", help="an adapter; repeatable")
    add("--draft", default="", help="a smaller model, for studies of several: whatever --model takes")
    add("--table", default="", help="a folder that 'anabranch train ngram' wrote, for the same studies")
    add("--lora", type=Path, metavar="FOLDER", help="merge this LoRA into the model, in studies of a tuned target")
    add("--suite", help="prompts: own, spec_bench, mt_bench, ... (default: the study's own)")
    add("--data", type=Path, help="folder with the suites and data sets")
    add("--limit", type=int, help="number of prompts, texts or trees (default: the study's own)")
    add("--new", type=int, help="new tokens per prompt (default: the study's own)")
    add("--steps", type=int, default=40, help="optimiser steps, in studies that train")
    add("--rounds", type=int, default=ROUNDS, help="rounds of alternating steps, in studies that time these")
    add("--out", type=Path, help="write the result to this JSON file")
    add("--force", action="store_true", help="replace an existing result")
    return parser.parse_args()


def adapters(words: list[str]) -> dict[str, Path]:
    """The folders by label; without a label, by the folder's name. Raises InputError for a repeated label."""
    found: dict[str, Path] = {}
    for word in words:
        label, _, folder = word.partition("=") if "=" in word else ("", "", word)
        path = Path(folder).expanduser()
        label = label or path.name
        if label in found:
            raise InputError(f"--adapter has the label {label!r} twice; give each its own with LABEL=FOLDER")
        found[label] = path
    return found


class Kept:
    """The parts of a study that were measured, in a file that is deleted when the result is written.

    settings  what they depend on; parts that were measured with others are refused
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, force: bool) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.parts: dict[str, Any] = {}
        self.environment = environment(torch.device("cpu"))
        self._began, self._before = time.perf_counter(), 0.0
        if path.is_file() and not force:
            found = read_json(path, "start over with --force")
            if found.get("settings") != self.settings:
                raise InputError(f"{path} has parts of a study with other settings; repeat these, or give --force")
            self.parts, self._before = found["parts"], found["seconds"]
            commits = dict.fromkeys([found["commit"], self.environment["commit"]])
            self.environment["commit"] = " then ".join(commits)

    @property
    def seconds(self) -> float:
        """The time of all runs."""
        return round(self._before + time.perf_counter() - self._began, 1)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """As ``Setup.part``."""
        if name not in self.parts:
            self.parts[name] = json.loads(json.dumps(measure()))
            said = {"settings": self.settings, "seconds": self.seconds, "commit": self.environment["commit"]}
            write_atomically(self.path, json.dumps({**said, "parts": self.parts}) + "\n")
        return self.parts[name]


def run(study: Study, args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write the result, and return it."""
    assert study.measure is not None
    sizes = {
        "limit": study.limit if args.limit is None else args.limit,
        "new": study.new if args.new is None else args.new,
        "steps": args.steps,
        "rounds": args.rounds,
    }
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}")
    suite = args.suite or study.suite or "own"
    asked = {"study": study.name, "model": Path(args.model).name, "dtype": args.dtype, "suite": Path(suite).name}
    asked |= {"draft": Path(args.draft).name, "table": Path(args.table).name, "adapters": args.adapter}
    asked |= {"lora": str(args.lora or ""), **sizes}
    kept = Kept(args.out.with_name(f"{args.out.name}.parts"), asked, force=args.force)
    setup = Setup(
        args.model,
        args.dtype,
        adapters(args.adapter),
        suite,
        args.data,
        **sizes,
        draft=args.draft,
        table=args.table,
        lora=args.lora,
        report=say,
        part=kept.part,
    )
    set_threads(None)
    measured = study.measure(setup)
    result = {
        "study": study.name,
        "command": shown_command("python", *sys.argv),
        "model": Path(args.model).name,
        "suite": Path(suite).name,
        "limit": sizes["limit"],
        "seconds": kept.seconds,
        **measured,
        "environment": kept.environment,
    }
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    kept.path.unlink(missing_ok=True)
    return result


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    args = parse()
    if args.list or args.study is None:
        for name, study in MEASURED.items():
            print(f"{name:26}{study.papers}: {study.title}")
        return
    study = MEASURED[args.study]
    try:
        if args.out is None:
            raise InputError("give the file of the result with --out benchmarks/study-NAME-MACHINE-DATE.json")
        check_output(args.out, force=args.force)
        check_writable(args.out)
        result = run(study, args)
    except AnabranchError as error:
        raise SystemExit(f"study.py: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command continues after the last part that was measured") from None
    print(f"{study.papers}: {study.ours(result)}\n")
    print("\n".join(table(*study.table(result))))


if __name__ == "__main__":
    main()
