"""A benchmark session: measure the machine, open and warm up the contenders, serve the loads, summarise the result.

A session can be stopped at any point (KeyboardInterrupt) and still gives a result for the completed loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from anabranch.bench.entries import Entry, open_entry, plain_of
from anabranch.bench.journal import Journal
from anabranch.bench.machine import measure_machine
from anabranch.bench.recordings import Recordings
from anabranch.bench.report import SCHEMA, environment
from anabranch.bench.run import (
    FAILURES,
    Answer,
    Contender,
    Encoded,
    Load,
    Report,
    Round,
    describe,
    one_by_one,
    rounds,
    warm_up,
)
from anabranch.bench.summary import ContenderAnswers, gather, summarise, summarise_rows
from anabranch.declared import Keywords
from anabranch.loading import Loaded
from anabranch.model.pack import weight_bytes
from anabranch.model.quantize import Rounding
from anabranch.support.files import without_folders
from anabranch.support.memory import forget_peak, peak_memory_mb

__all__ = ["Session"]

ROWS_SCHEMA = 1  # of results by number of rows
Tell = Callable[[str], None]


class Session:
    """A benchmark session; a context manager. ``run`` describes the measurement and becomes part of the result.

    rows   decode all prompts together, so many at a time, for each of these numbers; empty: decode them one by one
    shown  number of prompts whose forward passes are kept one by one, to be shown as examples
    call   the options of decoding, without the number of new tokens
    """

    def __init__(
        self,
        run: Mapping[str, Any],
        entries: Sequence[Entry],
        prompts: Sequence[Encoded],
        loaded: Mapping[Rounding, Loaded],
        call: Keywords,
        tell: Tell = lambda sentence: None,
        recordings: Recordings | None = None,
        shown: int = 0,
        rows: Sequence[int] = (),
    ) -> None:
        self.run, self.entries, self.prompts, self.tell = run, entries, prompts, tell
        self.repeats, self.every = run["repeats"], run.get("every", {})
        self.loads = one_by_one(prompts)
        if rows:  # every number of rows in each repeat
            self.loads = [Load(tuple(prompts), number) for _ in range(self.repeats) for number in rows]
            self.repeats = 1
        self.recordings = Recordings({}, {}, {}) if recordings is None else recordings
        self.loaded, self.target, self.call = loaded, next(iter(loaded.values())).target, call
        self.shown = shown
        self.environment: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        self.memory_mb: dict[str, float] = {}
        self.journal: Journal | None = None
        self.done: list[Round] = []
        self.errors: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {
            e.name: {"spec": without_folders(e.spec), "kind": e.kind, "weights": e.weights} for e in entries
        }
        self.contenders: dict[str, Contender] = {}
        self._exits = ExitStack()
        self._exits.enter_context(self.recordings)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def failed(self) -> dict[str, str]:
        """The contenders that failed so far, and why."""
        return self.errors | {name: why for one in self.done for name, why in one.errors.items()}

    @property
    def complete(self) -> bool:
        """Return whether all loads have been served."""
        return len(self.done) == len(self.loads)

    def prepare(self, out: Path | None, *, resume: bool) -> None:
        """Measure the machine and start the journal of ``out``, or read both from the journal of a stopped run."""
        self.environment = environment(self.target.decoder.device)
        settings = {"schema": SCHEMA, **self.run, **self.environment}
        settings = {name: value for name, value in settings.items() if name not in ("date", "commit")}
        settings["--trace"] = "given" if self.recordings.places else "not given"
        if out is not None and resume:
            self.journal = Journal.resume(out, settings)
            self.done = self.journal.rounds
            header = self.journal.header
            self.machine, self.errors = header["machine"], header["errors"]
            commits = dict.fromkeys([header["environment"]["commit"], self.environment["commit"]])
            self.environment = header["environment"] | {"commit": " then ".join(commits)}
            self.recordings.go_on(len(self.done), [e.name for e in self.entries if e.name not in self.failed])
            self.tell(f"continuing after {len(self.done)} of {len(self.prompts)} prompts")
            return
        self.tell("measuring the machine: memory bandwidth and matrix rate")
        self.machine = measure_machine(self.target.decoder).to_dict()
        self.tell(
            f"{self.machine['read_gb_s'][1]:.1f} GB/s, {self.machine['matrix_tflop_s'][1]:.2f} TFLOP/s; reading "
            f"{self.machine['weight_mb']:.1f} MB of weights takes at least {self.machine['floor_ms']:.2f} ms per token"
        )
        if out is not None:
            kept = {"settings": settings, "machine": self.machine, "environment": self.environment}
            self.journal = Journal(Journal.path_of(out), kept, self.done)

    def open(self) -> None:
        """Open and warm up all contenders; those that fail are reported, and the others continue."""
        most = self.run["max_new_tokens"]
        capacity = max(len(ids) for _, ids in self.prompts) + most
        for entry in self.entries:
            if entry.name in self.failed:
                continue
            self.tell(f"opening {entry.name}")
            began = time.perf_counter()
            try:
                contender = open_entry(
                    entry,
                    self.loaded[entry.weights],
                    call=self.call,
                    threads=torch.get_num_threads(),
                    capacity=capacity,
                )
            except FAILURES as error:
                self._fail(entry.name, describe(error))
                continue
            if spec := getattr(contender, "spec", ""):
                self.facts[entry.name]["drafter"] = without_folders(spec)
            self._exits.callback(getattr(contender, "close", lambda: None))
            self.contenders[entry.name] = contender
            self.facts[entry.name]["open_seconds"] = round(time.perf_counter() - began, 3)
        self.tell("warming up")
        seconds, errors = warm_up(self.contenders, self.loads, max_new_tokens=most)
        for name, value in seconds.items():
            self.facts[name]["warm_up_seconds"] = round(value, 3)
        for name, why in errors.items():
            self._fail(name, why)
            del self.contenders[name]
        if self.journal is not None and not self.done:
            self.journal.begin(self.errors)

    def _fail(self, name: str, why: str) -> None:
        self.errors[name] = why
        self.tell(f"{name} is not measured: {why}")

    def decode(self, report: Report) -> None:
        """Serve the remaining loads; every round is on disk before the next one starts."""
        if self.machine:
            forget_peak(self.target.decoder.device)
        try:
            for one in rounds(
                self.contenders,
                self.loads,
                max_new_tokens=self.run["max_new_tokens"],
                repeats=self.repeats,
                start=len(self.done),
                report=report,
                take=self.recordings.take,
                shown=self.shown,
                every=self.every,
            ):
                for name, why in one.errors.items():
                    self.tell(f"{name} is not measured: {why}")
                # before the journal, so that every prompt in the journal is recorded
                self.recordings.write(one.index, list(one.outcomes))
                if self.journal is None:
                    self.done.append(one)
                else:
                    self.journal.add(one)  # ``self.done`` is its list of rounds
        finally:
            self.memory_mb = peak_memory_mb(self.target.decoder.device)
        if self.complete and self.machine:
            self._measure_again()

    def _measure_again(self) -> None:
        """Measure again, since a shared machine may have been slow before the run; the faster result counts."""
        self.tell("measuring the machine again")
        after = measure_machine(self.target.decoder).to_dict()
        self.machine["after"] = {name: after[name] for name in ("read_gb_s", "matrix_tflop_s")}
        self.machine["floor_ms"] = min(self.machine["floor_ms"], after["floor_ms"])

    def floor_ms(self, weights: Rounding) -> float:
        """Milliseconds to read these weights once."""
        share = weight_bytes(self.loaded[weights].target.decoder) / 1e6 / float(self.machine["weight_mb"])
        return round(float(self.machine["floor_ms"]) * share, 4)

    def forget(self) -> None:
        """Remove the journal, once the result is written or if there is nothing to resume."""
        if self.journal is not None:
            self.journal.remove()

    def answers(self) -> list[ContenderAnswers]:
        """The answers so far by contender."""
        return gather([entry.name for entry in self.entries], self.done, self.errors, self.every)

    def examples(self) -> list[dict[str, Answer]]:
        """The first answers to the prompts whose passes are kept, by contender."""
        return [{name: many[0].answers[0] for name, many in one.outcomes.items()} for one in self.done[: self.shown]]

    def baseline(self, name: str) -> str:
        """The name of the plain decoding that a contender is compared with."""
        weights = next(entry.weights for entry in self.entries if entry.name == name)
        return plain_of(self.entries, weights) or ""

    def comparable(self, name: str) -> bool:
        """Return whether its tokens should equal plain decoding's: a peer samples with its own random numbers."""
        return not self.call.get("temperature") or self.facts[name]["kind"] == "ours"

    def records(self) -> list[dict[str, Any]]:
        """One record per contender for all completed prompts (docs/metrics.md), with its properties."""
        records = summarise(
            self.answers(),
            self.prompts[: len(self.done)],
            baseline=self.baseline,
            floor_ms={entry.name: self.floor_ms(entry.weights) for entry in self.entries} if self.machine else None,
            comparable=self.comparable,
        )
        facts = self._facts()
        return [record | facts[record["name"]] for record in records]

    def result(self, command: str) -> dict[str, Any]:
        """The result for all completed prompts, in the format of a result file (docs/metrics.md)."""
        return {
            "schema": SCHEMA,
            "complete": self.complete,
            "prompts_done": len(self.done),
            "run": {"command": command, **self.run},
            "environment": self.environment,
            "machine": self.machine,
            "floor_ms": {weights: self.floor_ms(weights) for weights in self.loaded},
            "memory_mb": self.memory_mb,
            "contenders": self.records(),
            "prompts": [
                {"name": prompt.name, "task": prompt.task, "tokens": len(ids)}
                for prompt, ids in self.prompts[: len(self.done)]
            ],
        }

    def rows_result(self, command: str) -> dict[str, Any]:
        """The result by number of rows, for all completed rounds."""
        failed = self.failed
        baselines = {entry.name: plain_of(self.entries, entry.weights) for entry in self.entries}
        return {
            "schema": ROWS_SCHEMA,
            "kind": "throughput",
            "complete": self.complete,
            "run": {"command": command, **self.run},
            "environment": self.environment,
            "machine": self.machine,
            "contenders": [
                {"name": name, **facts, **({"error": failed[name]} if name in failed else {})}
                for name, facts in self._facts().items()
            ],
            "results": summarise_rows(self.done, baselines, errors=self.errors, comparable=self.comparable),
        }

    def _facts(self) -> dict[str, dict[str, Any]]:
        """The properties of each contender, with what a peer says about itself."""
        for name, contender in self.contenders.items():
            if info := getattr(contender, "info", None):
                self.facts[name]["info"] = dict(info)
        return self.facts
