"""Throughput and latency with N concurrent prompts, for our drafters and for peers that batch.

The load is closed-loop: each of N clients waits for its answer before it submits its next prompt, so N rows are busy
until the prompts run out. In every repeat all contenders alternate at each N, in rotating order; ratios to plain
decoding are computed within a repeat.

    throughput                 new tokens of all prompts per second, from the first submission to the last token
    time to first token (TTFT) from submission to the first new tokens of the prompt
    inter-token latency (ITL)  from one arrival of tokens to the next of the same prompt, divided by the number of
                               tokens that arrived together, and counted once for each of them

Peers with static batches (transformers) decode N prompts that start and end together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabranch.bench.calls import CALL_TITLES, call_cells, calls_per_token
from anabranch.bench.peers import Peer
from anabranch.bench.run import FAILURES, describe
from anabranch.control.choice import Choice
from anabranch.control.controller import Controller
from anabranch.control.costs import Costs
from anabranch.decoding.engine import Request, Step
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.stats import Stats
from anabranch.errors import InputError
from anabranch.methods import Drafter
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams

__all__ = [
    "THROUGHPUT_TITLES",
    "Answer",
    "Batched",
    "BatchedPeer",
    "Ours",
    "Round",
    "Served",
    "check_rows",
    "rounds",
    "summarise",
    "throughput_rows",
]

WARM_UP_TOKENS = 8
P95 = 0.95
THROUGHPUT_TITLES = (
    *("contender", "rows", "tokens/s\n(range)", "ratio to\nplain", "TTFT ms\nmedian / p95", "ITL ms\nmedian / p95"),
    *("tokens/\ntarget call", *CALL_TITLES, "draft\nnodes", "equal"),
)

Prompts = Sequence[Sequence[int]]
Report = Callable[[int, int, str], None]


@dataclass
class Answer:
    """A prompt's new tokens, and for each arrival the seconds since submission and the number of tokens."""

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, seconds: float, tokens: Sequence[int]) -> None:
        """Add tokens that arrived together."""
        if tokens:
            self.token_ids += tokens
            self.arrivals.append((seconds, len(tokens)))

    @property
    def first_token_seconds(self) -> float:
        """The time to the first token."""
        return self.arrivals[0][0]

    @property
    def token_seconds(self) -> list[float]:
        """The latency of every token after the first arrival."""
        found: list[float] = []
        for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [(now - before) / tokens] * tokens
        return found


@dataclass(frozen=True)
class Served:
    """The result of decoding all prompts: answers in the order of the prompts, total seconds, and our own steps."""

    answers: list[Answer]
    seconds: float
    stats: Stats | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts divided by seconds."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds


class Batched(Protocol):
    """Something that decodes several prompts at a time."""

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Served:
        """Decode all prompts, ``rows`` at a time."""


class Ours:
    """One drafter on the scheduler.

    Each run has its own scheduler, so that runs do not reuse each other's prefixes. Its cache is allocated before the
    clock starts, as that of a server is: the first write to some hundred MB takes 0.04 to 0.9 s. The controller
    controller of an adaptive drafter is kept for each number of rows.

    costs   the step costs, for adaptive drafters
    choice  yields of the drafters to choose from
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sampling: SamplingParams,
        costs: Costs | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.target, self.drafter, self.sampling, self.costs, self.choice = target, drafter, sampling, costs, choice
        self._stop = frozenset(target.config.eos_token_ids)
        self._learned: dict[int, Controller] = {}

    def _controller(self, rows: int) -> Controller | None:
        if self.costs is not None and rows not in self._learned:
            self._learned[rows] = Controller(self.costs, ragged=self.target.decoder.ragged, choice=self.choice)
        return self._learned.get(rows)

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Served:
        """Keep ``rows`` prompts in progress until none is left."""
        scheduler = Scheduler(self.target.decoder, rows=rows, controller=self._controller(rows))
        scheduler.reserve(self.drafter, max(map(len, prompts)) + max_new_tokens)
        answers = [Answer() for _ in prompts]
        waiting = iter(range(len(prompts)))
        open_at: dict[Ticket, tuple[int, float]] = {}
        steps: list[Step] = []

        def submit() -> None:
            index = next(waiting, None)
            if index is not None:
                request = Request(prompts[index], max_new_tokens, self.sampling, self._stop)
                open_at[scheduler.submit(request, self.drafter)] = (index, time.perf_counter())

        began = time.perf_counter()
        for _ in range(rows):
            submit()
        while scheduler.busy:
            events = scheduler.tick()
            now = time.perf_counter()
            for ticket in open_at:
                if ticket.error is not None:
                    raise ticket.error
            for ticket, step in events:
                index, submitted = open_at[ticket]
                answers[index].add(now - submitted, step.tokens)
                steps.append(step)
                if step.finish is not None:
                    del open_at[ticket]
                    submit()
        return Served(answers, time.perf_counter() - began, Stats.of(steps))


class BatchedPeer:
    """A peer that decodes static batches: each starts after all rows of the previous one have ended."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Served:
        """Decode the prompts in batches of ``rows``; seconds are measured by the peer around its own calls."""
        answers: list[Answer] = []
        seconds = 0.0
        for start in range(0, len(prompts), rows):
            found = self.peer.batch(prompts[start : start + rows], max_new_tokens=max_new_tokens)
            seconds += found.seconds
            for token_ids in found.token_ids:
                answer = Answer()
                for at, token in zip(found.step_seconds, token_ids, strict=False):
                    answer.add(at, [token])
                answers.append(answer)
        return Served(answers, seconds)


@dataclass(frozen=True)
class Round:
    """One run of each contender at one number of rows; ``errors`` has the reasons of failures."""

    repeat: int
    rows: int
    runs: dict[str, Served]
    errors: dict[str, str] = field(default_factory=dict)


def check_rows(rows: Sequence[int], prompts: int) -> None:
    """Check that there are enough prompts for these numbers of rows. Raises InputError."""
    for number in rows:
        if number < 1:
            raise InputError(f"--rows must be at least 1, got {number}")
        if number > prompts:
            raise InputError(
                f"--rows {number} needs at least {number} prompts, got {prompts}; raise --limit, choose a larger "
                "--suite or lower --rows"
            )
    if len(set(rows)) < len(rows):
        raise InputError("--rows has a number twice; give each once")


def rounds(
    contenders: Mapping[str, Batched],
    prompts: Prompts,
    rows: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int,
    report: Report = lambda done, total, what: None,
) -> Iterator[Round]:
    """Measure every contender at every number of rows, ``repeats`` times; yields one round per repeat and number.

    Each contender decodes a few warm-up tokens at each number of rows before it is timed. One that fails is left out
    from then on; if none is left, the rounds end. ``report`` is called with rounds done, rounds in total, and the next
    run.
    """
    names, failed, total = list(contenders), set[str](), repeats * len(rows)
    for turn in range(total):
        repeat, place = divmod(turn, len(rows))
        number = rows[place]
        found = Round(repeat, number, {})
        order = [names[(repeat + place + i) % len(names)] for i in range(len(names))]
        calls = [(name, False) for name in order]
        if repeat == 0:
            calls = [(name, True) for name in order] + calls
        for name, warm_up in calls:
            if name in failed:
                continue
            report(turn, total, f"{name}, {number} rows{', warm-up' if warm_up else ''}")
            asked = prompts[:number] if warm_up else prompts
            most = min(WARM_UP_TOKENS, max_new_tokens) if warm_up else max_new_tokens
            try:
                served = contenders[name].serve(asked, rows=number, max_new_tokens=most)
                if not all(answer.token_ids for answer in served.answers):
                    raise RuntimeError("it returned no tokens for a prompt")
            except FAILURES as error:
                failed.add(name)
                found.errors[name] = describe(error)
                continue
            if not warm_up:
                found.runs[name] = served
        yield found
        if len(failed) == len(names):
            return
    report(total, total, "")


def summarise(
    done: Sequence[Round], baselines: Mapping[str, str | None], *, comparable: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """One record per contender and number of rows.

    baselines   the plain decoding that each contender is compared with, by name
    comparable  contenders whose tokens should equal plain decoding's

    Texts are compared with plain decoding at the same number of rows; those of plain decoding, with the first number of
    rows. Ratios and rates are [lowest, median, highest] over repeats; latencies are medians and 95th percentiles over
    all prompts and tokens.
    """
    errors = {name: why for one in done for name, why in one.errors.items()}
    numbers = list(dict.fromkeys(one.rows for one in done))
    records: list[dict[str, Any]] = []
    for name, baseline in baselines.items():
        if name in errors:
            records.append({"name": name, "error": errors[name]})
            continue
        for number in numbers:
            at = [one for one in done if one.rows == number]
            record = {"name": name, "rows": number} | _latencies([one.runs[name] for one in at])
            pairs = [(one.runs[name], one.runs[baseline]) for one in at if baseline in one.runs]
            if pairs:
                record["ratio"] = _spread([mine.tokens_per_second / plain.tokens_per_second for mine, plain in pairs])
                if comparable(name):
                    whole = [one for one in done if one.rows == numbers[0]] if name == baseline else at
                    record["equal_outputs"] = _equal([one.runs[name] for one in at], whole[0].runs[baseline or name])
            records.append(record)
    return records


def _latencies(runs: Sequence[Served]) -> dict[str, Any]:
    first = [1e3 * answer.first_token_seconds for run in runs for answer in run.answers]
    later = [1e3 * seconds for run in runs for answer in run.answers for seconds in answer.token_seconds]
    record: dict[str, Any] = {
        "prompts": len(runs[0].answers),
        "tokens": sum(len(answer.token_ids) for answer in runs[0].answers),
        "tokens_per_second": _spread([run.tokens_per_second for run in runs]),
        "first_token_ms": _percentiles(first),
        "token_ms": _percentiles(later),
    }
    if (stats := runs[0].stats) is not None:
        record["mean_acceptance_length"] = round(stats.mean_acceptance_length, 4)
        record |= calls_per_token(stats)
        record["draft_nodes_per_step"] = round(stats.draft_nodes_per_step, 2)
    return record


def _equal(runs: Sequence[Served], plain: Served) -> int:
    """The number of prompts whose tokens equal plain decoding's in every run."""
    texts = [[answer.token_ids for answer in run.answers] for run in runs]
    return sum(all(text[i] == answer.token_ids for text in texts) for i, answer in enumerate(plain.answers))


def _spread(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (min(values), statistics.median(values), max(values))]


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile (nearest rank); None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return {
        "median": round(statistics.median(ranked), 4),
        "p95": round(ranked[math.ceil(P95 * len(ranked)) - 1], 4),
    }


def throughput_rows(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The records as rows of a table of ``THROUGHPUT_TITLES``."""
    rows = []
    for record in records:
        if "error" in record:
            rows.append([str(record["name"]), "-", f"failed: {record['error']}", *["-"] * (len(THROUGHPUT_TITLES) - 3)])
            continue
        low, middle, high = record["tokens_per_second"]
        ratio = record.get("ratio")
        rows.append(
            [
                str(record["name"]),
                str(record["rows"]),
                f"{middle:.1f} ({low:.1f}-{high:.1f})",
                "-" if ratio is None else f"{ratio[1]:.2f} ({ratio[0]:.2f}-{ratio[2]:.2f})",
                _both(record["first_token_ms"]),
                _both(record["token_ms"]),
                f"{record['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in record else "-",
                *call_cells(record),
                f"{record['draft_nodes_per_step']:.1f}" if "draft_nodes_per_step" in record else "-",
                f"{record['equal_outputs']}/{record['prompts']}" if "equal_outputs" in record else "-",
            ]
        )
    return rows


def _both(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['median']:.1f} / {found['p95']:.1f}"
