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
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from anabranch.bench.suites import SuitePrompt
from anabranch.control.controller import Controller
from anabranch.declared import Keywords
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter
from anabranch.errors import AnabranchError
from anabranch.model.load import Target
from anabranch.options import requests
from anabranch.tree import DraftTree

__all__ = [
    "FAILURES",
    "Answer",
    "Contender",
    "Encoded",
    "Load",
    "Ours",
    "Outcome",
    "Pass",
    "Prompts",
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
Take = Callable[[str, "Answer"], None]
Prompts = Sequence[Sequence[int]]


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
    """The result of decoding one prompt.

    seconds   from the submission to the last token
    arrivals  seconds since the submission and number of tokens, for each arrival of tokens; empty if a peer does not
              report them
    stats     of our own steps
    passes    our own forward passes one by one, if this is an example to show
    steps     our own steps, until the answer is stored
    """

    token_ids: list[int]
    seconds: float
    arrivals: Sequence[tuple[float, int]] = ()
    stats: Stats | None = None
    passes: tuple[Pass, ...] = ()
    steps: Sequence[Step] = ()

    @staticmethod
    def of(steps: Sequence[Step], times: Sequence[float], prefill_seconds: float, prefill_tokens: int) -> Answer:
        """The answer of our own steps, which ended ``times`` seconds after the submission."""
        stats = Stats.of(steps)
        stats.seconds, stats.prefill_seconds, stats.prefill_tokens = times[-1], prefill_seconds, prefill_tokens
        tokens = [token for step in steps for token in step.tokens]
        arrivals = tuple((at, len(step.tokens)) for at, step in zip(times, steps, strict=True))
        return Answer(tokens, times[-1], arrivals, stats, steps=steps)

    def stored(self, *, shown: bool = False) -> Answer:
        """The same without its steps, whose trees take memory; with what each did if it will be ``shown``."""
        return replace(self, passes=tuple(passes_of(self.steps)) if shown else (), steps=())

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

    answers: Sequence[Answer]
    seconds: float

    def stored(self, *, shown: bool = False) -> Outcome:
        """The same with answers as they are kept."""
        return Outcome([answer.stored(shown=shown) for answer in self.answers], self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts divided by seconds."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of each prompt."""
        return [answer.token_ids for answer in self.answers]


class Contender(Protocol):
    """Something that decodes prompts, one or several at a time."""

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Outcome:
        """Decode all prompts as configured, ``rows`` at a time, up to the end token or ``max_new_tokens``."""


class Ours:
    """One drafter on the scheduler.

    Several prompts have a scheduler of their own, so that calls do not reuse each other's prefixes; single prompts
    share one that keeps none. The cache is allocated before the clock starts, as that of a server is: the first write
    to some hundred MB takes 0.04 to 0.9 s. An adaptive drafter keeps a controller for each number of rows.

    capacity    tokens of the longest prompt and its completion
    call        the options of decoding; those left out are the defaults of the model's generation config
    spec        the drafter's specification, "auto" resolved
    controller  makes the controller of an adaptive drafter; None: the engine's own
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        capacity: int,
        call: Keywords,
        spec: str = "",
        controller: Callable[[], Controller] | None = None,
    ) -> None:
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.call, self.spec = call, spec
        self._make_controller = controller
        self._controllers: dict[int, Controller] = {}
        self._alone: Scheduler | None = None

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Outcome:
        """Keep ``rows`` prompts in progress until none is left."""
        batch = requests(prompts, self.target, {**self.call, "max_new_tokens": max_new_tokens})
        if len(batch) == 1:
            self._alone = self._alone or self._scheduler(rows, prefix_bytes=0)
            engine = self._reserved(self._alone)
            engine.rehearse(batch[0])
            return self._serve(self._alone, batch)
        scheduler = self._scheduler(rows)
        self._reserved(scheduler)
        try:
            return self._serve(scheduler, batch)
        finally:
            scheduler.close()

    def _scheduler(self, rows: int, prefix_bytes: int | None = None) -> Scheduler:
        if self._make_controller is not None and rows not in self._controllers:
            self._controllers[rows] = self._make_controller()
        controller = self._controllers.get(rows)
        return Scheduler(self.target.decoder, rows=rows, controller=controller, prefix_bytes=prefix_bytes)

    def _reserved(self, scheduler: Scheduler) -> Engine:
        """The engine of an idle scheduler, with its cache."""
        if scheduler.engine is None:
            scheduler.reserve(self.drafter, self.capacity)
        assert scheduler.engine is not None
        return scheduler.engine

    def _serve(self, scheduler: Scheduler, requests: Sequence[Request]) -> Outcome:
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(requests))
        in_progress: dict[Ticket, tuple[int, float, list[Step], list[float]]] = {}

        def submit() -> None:
            if (upcoming := next(waiting, None)) is not None:
                place, request = upcoming
                in_progress[scheduler.submit(request, self.drafter)] = (place, time.perf_counter(), [], [])

        began = time.perf_counter()
        for _ in range(scheduler.rows):
            submit()
        while scheduler.busy:
            produced = scheduler.tick()
            now = time.perf_counter()
            for ticket in in_progress:
                if ticket.error is not None:
                    raise ticket.error
            for ticket, step in produced:
                place, submitted, steps, times = in_progress[ticket]
                steps.append(step)
                times.append(now - submitted)
                if step.finish is not None:
                    prompt = len(requests[place].prompt_ids) - 1
                    answers[place] = Answer.of(steps, times, ticket.prefill_seconds, prompt)
                    del in_progress[ticket]
                    submit()
        return Outcome([answers[place] for place in range(len(requests))], time.perf_counter() - began)


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
    take    called with the answer to every prompt and its steps, outside the timing
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
                    if not all(served.texts):
                        raise RuntimeError("it returned no tokens")
                except FAILURES as error:
                    failed.add(name)
                    done.errors[name] = describe(error)
                    done.outcomes.pop(name, None)
                    continue
                done.outcomes.setdefault(name, []).append(served.stored(shown=index < shown))
                for answer in served.answers:
                    take(name, answer)
        yield done
        report(index + 1, len(loads), "")
