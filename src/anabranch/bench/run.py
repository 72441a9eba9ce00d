"""Alternating measurement: all contenders serve a load, in rotating order, before the next load.

A load is one prompt, or many prompts of which several are decoded at a time. The compared figure is the ratio to plain
decoding of the same load, measured within minutes, so that drift of the machine affects all contenders alike. Nothing
is timed before every contender has decoded a few warm-up tokens. A round is one load; an interrupted round is dropped,
so that all contenders have the same loads.

Several prompts at a time are a closed loop: each of N clients waits for its answer before it submits its next prompt,
so N rows are busy until the prompts run out. Peers with static batches (transformers) decode N prompts that start and
end together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from anabranch.bench.contenders import Contender, Run, Served
from anabranch.bench.suites import SuitePrompt
from anabranch.decoding.engine import Step
from anabranch.decoding.stats import Stats
from anabranch.errors import AnabranchError
from anabranch.tree import DraftTree

__all__ = [
    "FAILURES",
    "Answer",
    "Encoded",
    "Load",
    "Outcome",
    "Pass",
    "Round",
    "describe",
    "one_by_one",
    "passes_of",
    "rounds",
    "warm_up",
]


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    tokens    emitted, in order
    sources   what proposed each of them; "target" for the target's own
    rejected  draft tokens that would have followed the accepted ones: each the drafter's first choice
    """

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    rejected: tuple[int, ...] = ()

    def to_list(self) -> list[Any]:
        """As JSON values, for the journal."""
        return [self.tokens, self.sources, self.rejected]

    @staticmethod
    def from_list(record: Any) -> Pass:
        """The inverse of ``to_list``."""
        tokens, sources, rejected = map(tuple, record)
        return Pass(tokens, sources, rejected)


def passes_of(steps: Iterable[Step]) -> list[Pass]:
    """The passes of a sequence."""
    return [
        Pass(step.tokens, step.sources, () if step.finish else _first_choices(step.tree, step.verdict.path[-1]))
        for step in steps
    ]


def _first_choices(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The tokens from a node on, always to the first child."""
    choices = []
    while children := tree.children(node):
        node = children[0]
        choices.append(int(tree.tokens[node]))
    return tuple(choices)


# failures of a contender, which is reported as failed and excluded from timings; the others continue
FAILURES = (AnabranchError, RuntimeError, ValueError, OSError, MemoryError)
WARM_UP_TOKENS = 16

Encoded = tuple[SuitePrompt, Sequence[int]]
Report = Callable[[int, int, str], None]
Take = Callable[[str, Run], None]


@dataclass(frozen=True)
class Load:
    """Prompts that every contender decodes, ``rows`` at a time, before the next load."""

    prompts: tuple[Encoded, ...]
    rows: int = 1

    @property
    def ids(self) -> list[Sequence[int]]:
        """The token ids of the prompts."""
        return [ids for _, ids in self.prompts]

    def __str__(self) -> str:
        if len(self.prompts) == 1:
            return f"on {self.prompts[0][0].task}"
        return f"with {self.rows} row{'s' if self.rows > 1 else ''}"


def one_by_one(prompts: Sequence[Encoded]) -> list[Load]:
    """A load for each prompt."""
    return [Load((prompt,)) for prompt in prompts]


@dataclass(frozen=True)
class Answer:
    """The stored result of decoding one prompt: a ``Run`` whose steps are counted.

    passes  our own forward passes one by one, if this is an example to show
    """

    token_ids: list[int]
    seconds: float
    arrivals: tuple[tuple[float, int], ...] = ()
    stats: Stats | None = None
    passes: tuple[Pass, ...] = ()

    @staticmethod
    def of(run: Run, *, shown: bool = False) -> Answer:
        """Count the steps of a run, and keep what each did if it will be ``shown``."""
        passes = tuple(passes_of(run.steps)) if shown else ()
        return Answer(list(run.token_ids), run.seconds, tuple(run.arrivals), run.stats, passes)

    @property
    def tokens_per_second(self) -> float:
        """New tokens divided by seconds, which include the prompt."""
        return len(self.token_ids) / self.seconds

    @property
    def first_token_seconds(self) -> float | None:
        """The time to the first token (TTFT); None if the contender does not report it."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def token_seconds(self) -> float | None:
        """Seconds per output token after the first ones (TPOT); None if unknown or if nothing followed."""
        if not self.arrivals or (rest := len(self.token_ids) - self.arrivals[0][1]) < 1:
            return None
        return (self.seconds - self.arrivals[0][0]) / rest

    @property
    def latencies(self) -> list[float]:
        """The latency of every token after the first arrival (ITL): tokens that arrive together share the time."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [(now - before) / tokens for (before, _), (now, tokens) in pairs for _ in range(tokens)]

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step after the first; None for peers, whose steps are not reported."""
        if self.stats is None or not self.arrivals or self.stats.steps < 2:
            return None
        return (self.seconds - self.arrivals[0][0]) / (self.stats.steps - 1)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        record: dict[str, Any] = {"token_ids": self.token_ids, "seconds": self.seconds, "arrivals": self.arrivals}
        record["stats"] = None if self.stats is None else self.stats.to_dict()
        return record | {"passes": [one.to_list() for one in self.passes]} if self.passes else record

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Answer:
        """The inverse of ``to_dict``."""
        stats = record["stats"]
        return Answer(
            list(record["token_ids"]),
            record["seconds"],
            tuple((seconds, tokens) for seconds, tokens in record["arrivals"]),
            None if stats is None else Stats.from_dict(stats),
            tuple(map(Pass.from_list, record.get("passes", ()))),
        )


@dataclass(frozen=True)
class Outcome:
    """A contender's answers to a load, in the order of its prompts, and the seconds that all of them took."""

    answers: tuple[Answer, ...]
    seconds: float

    @staticmethod
    def of(served: Served, *, shown: bool = False) -> Outcome:
        """Count the steps of what was served."""
        return Outcome(tuple(Answer.of(run, shown=shown) for run in served.runs), served.seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts divided by seconds."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of each prompt."""
        return [answer.token_ids for answer in self.answers]


@dataclass(frozen=True)
class Round:
    """One load served by all contenders: their outcomes, one per repeat, and the errors of those that failed."""

    index: int
    rows: int = 1
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def describe(error: BaseException) -> str:
    """An error in one line: the message of one of ours, type and message of any other."""
    text = " ".join(str(error).split())
    return text if isinstance(error, AnabranchError) else f"{type(error).__name__}: {text}"


def warm_up(
    contenders: Mapping[str, Contender], loads: Sequence[Load], *, max_new_tokens: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Let every contender decode a few tokens at each number of rows; returns seconds and errors by name."""
    first = {load.rows: load for load in reversed(loads)}
    seconds: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, contender in contenders.items():
        began = time.perf_counter()
        try:
            for rows in sorted(first):
                few = min(WARM_UP_TOKENS, max_new_tokens)
                contender.serve(first[rows].ids[:rows], rows=rows, max_new_tokens=few)
        except FAILURES as error:
            errors[name] = describe(error)
        seconds[name] = time.perf_counter() - began
    return seconds, errors


def rounds(
    contenders: Mapping[str, Contender],
    loads: Sequence[Load],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    start: int = 0,
    report: Report = lambda done, total, what: None,
    take: Take = lambda name, run: None,
    shown: int = 0,
    every: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Round]:
    """Serve every load from ``start`` on, ``repeats`` times with each contender; yields one round per load.

    A contender that fails is left out from then on; if none is left, the rounds end.

    report  called with loads done, loads in total, and what is next
    take    called with the run of every prompt, outside the timing
    shown   keep what the forward passes did on this many loads, the first ones
    every   contenders that serve only every n-th load, from the first on
    """
    names = list(contenders)
    failed: set[str] = set()
    for index in range(start, len(loads)):
        if len(failed) == len(names):
            return
        load, done = loads[index], Round(index, loads[index].rows)
        for repeat in range(repeats):
            turn = (index * repeats + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                if name in failed or index % every.get(name, 1):
                    continue
                report(index, len(loads), f"{name} {load}")
                try:
                    served = contenders[name].serve(load.ids, rows=load.rows, max_new_tokens=max_new_tokens)
                    if not all(run.token_ids for run in served.runs):
                        raise RuntimeError("it returned no tokens")
                except FAILURES as error:
                    failed.add(name)
                    done.errors[name] = describe(error)
                    done.outcomes.pop(name, None)
                    continue
                done.outcomes.setdefault(name, []).append(Outcome.of(served, shown=index < shown))
                for run in served.runs:
                    take(name, run)
        yield done
        report(index + 1, len(loads), "")
