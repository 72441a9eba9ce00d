"""Alternating measurement: all contenders decode a prompt, in rotating order, before the next prompt.

The compared figure is the ratio to plain decoding of the same prompt, measured within minutes, so that drift of the
machine affects all contenders alike. Nothing is timed before every contender has decoded a warm-up prompt. A round is
one prompt; an interrupted round is dropped, so that all contenders have the same prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.bench.contenders import Contender, Run
from anabranch.bench.passes import Pass, passes_of
from anabranch.bench.suites import SuitePrompt
from anabranch.decoding.stats import Stats
from anabranch.errors import AnabranchError

__all__ = ["FAILURES", "Answer", "ContenderAnswers", "Round", "describe", "gather", "rounds", "warm_up"]

# failures of a contender, which is reported as failed and excluded from timings; the others continue
FAILURES = (AnabranchError, RuntimeError, ValueError, OSError, MemoryError)
WARM_UP_TOKENS = 16

Encoded = tuple[SuitePrompt, Sequence[int]]
Report = Callable[[int, int, str], None]
Take = Callable[[str, Run], None]


@dataclass(frozen=True)
class Answer:
    """The stored result of one run: new token ids, seconds, and statistics of our own steps.

    first_token_seconds  from the call to the first token; None if the contender does not report it
    first_tokens         number of tokens that arrived first; more than 1 if the first step accepted a draft
    passes               our own forward passes one by one, if this is an example to show
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float | None = None
    first_tokens: int = 1
    stats: Stats | None = None
    passes: tuple[Pass, ...] = ()

    @staticmethod
    def of(run: Run, *, shown: bool = False) -> Answer:
        """Count the steps of a run, and keep what each did if it will be ``shown``."""
        stats = Stats.of(run.steps) if run.steps else None
        if stats is not None:
            stats.seconds, stats.prefill_seconds = run.seconds, run.prefill_seconds
            stats.prefill_tokens = run.prefill_tokens
        first = len(run.steps[0].tokens) if run.steps else 1
        passes = tuple(passes_of(run.steps)) if shown else ()
        return Answer(list(run.token_ids), run.seconds, run.first_token_seconds, first, stats, passes)

    @property
    def tokens_per_second(self) -> float:
        """New tokens divided by seconds, which include the prompt."""
        return len(self.token_ids) / self.seconds

    @property
    def token_seconds(self) -> float | None:
        """Seconds per output token after the first ones (TPOT); None if unknown or if nothing followed."""
        rest = len(self.token_ids) - self.first_tokens
        if self.first_token_seconds is None or rest < 1:
            return None
        return (self.seconds - self.first_token_seconds) / rest

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step after the first; None for peers, whose steps are not reported."""
        if self.stats is None or self.first_token_seconds is None or self.stats.steps < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.stats.steps - 1)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        record: dict[str, Any] = {
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "first_tokens": self.first_tokens,
            "stats": None if self.stats is None else self.stats.to_dict(),
        }
        return record | {"passes": [one.to_list() for one in self.passes]} if self.passes else record

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Answer:
        """The inverse of ``to_dict``."""
        stats = record["stats"]
        return Answer(
            record["token_ids"],
            record["seconds"],
            record["first_token_seconds"],
            record["first_tokens"],
            None if stats is None else Stats.from_dict(stats),
            tuple(map(Pass.from_list, record.get("passes", ()))),
        )


@dataclass(frozen=True)
class Round:
    """One prompt decoded by all contenders: their answers, one per repeat, and the errors of those that failed."""

    index: int
    answers: dict[str, list[Answer]]
    errors: dict[str, str] = field(default_factory=dict)


@dataclass
class ContenderAnswers:
    """All answers of one contender, by prompt; with an ``error`` none of them is reported."""

    name: str
    answers: list[list[Answer]] = field(default_factory=list)
    error: str | None = None


def describe(error: BaseException) -> str:
    """An error in one line: the message of one of ours, type and message of any other."""
    text = " ".join(str(error).split())
    return text if isinstance(error, AnabranchError) else f"{type(error).__name__}: {text}"


def warm_up(
    contenders: Mapping[str, Contender], ids: Sequence[int], *, max_new_tokens: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Let every contender decode a few tokens; returns seconds and errors by name."""
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, contender in contenders.items():
        began = time.perf_counter()
        try:
            contender.decode(ids, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens))
        except FAILURES as error:
            errors[name] = describe(error)
        seconds[name] = time.perf_counter() - began
    return seconds, errors


def rounds(
    contenders: Mapping[str, Contender],
    prompts: Sequence[Encoded],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    start: int = 0,
    report: Report = lambda done, total, what: None,
    take: Take = lambda name, run: None,
    shown: int = 0,
) -> Iterator[Round]:
    """Decode every prompt from ``start`` on, ``repeats`` times with each contender; yields one round per prompt.

    A contender that fails is left out from then on; if none is left, the rounds end.

    report  called with prompts done, prompts in total, and what is next
    take    called with every counted run, outside the timing
    shown   keep what the forward passes did on this many prompts, the first ones
    """
    names = list(contenders)
    failed: set[str] = set()
    for index in range(start, len(prompts)):
        if len(failed) == len(names):
            return
        prompt, ids = prompts[index]
        found = Round(index, {})
        for repeat in range(repeats):
            turn = (index * repeats + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                if name in failed:
                    continue
                report(index, len(prompts), f"{name} on {prompt.task}")
                try:
                    run = contenders[name].decode(ids, max_new_tokens=max_new_tokens)
                    if not run.token_ids:
                        raise RuntimeError("it returned no tokens")
                except FAILURES as error:
                    failed.add(name)
                    found.errors[name] = describe(error)
                    found.answers.pop(name, None)
                    continue
                found.answers.setdefault(name, []).append(Answer.of(run, shown=index < shown))
                take(name, run)
        yield found
        report(index + 1, len(prompts), "")


def gather(names: Sequence[str], done: Sequence[Round], errors: Mapping[str, str]) -> list[ContenderAnswers]:
    """Group the rounds by contender; ``errors`` are from before the first round."""
    found = [ContenderAnswers(name, error=errors.get(name)) for name in names]
    for one in done:
        for measured in found:
            measured.error = measured.error or one.errors.get(measured.name)
            if measured.error is None:
                measured.answers.append(one.answers[measured.name])
    return found
