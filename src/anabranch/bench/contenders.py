"""Contenders: our drafters on our scheduler. Other engines are in ``peers``, each in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.control.controller import Controller
from anabranch.declared import Keywords
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter
from anabranch.model.load import Target
from anabranch.options import requests

__all__ = ["Contender", "Ours", "Prompts", "Run", "Served"]

Prompts = Sequence[Sequence[int]]


@dataclass
class Run:
    """The result of decoding one prompt.

    seconds   from the submission to the last token
    arrivals  seconds since the submission and number of tokens, for each arrival of tokens; empty if a peer does not
              report them
    steps     our own steps
    """

    token_ids: list[int]
    seconds: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    steps: list[Step] = field(default_factory=list)

    def add(self, seconds: float, step: Step) -> None:
        """Add a step that was decoded ``seconds`` after the submission."""
        self.token_ids += step.tokens
        self.seconds = seconds
        self.arrivals.append((seconds, len(step.tokens)))
        self.steps.append(step)

    @property
    def stats(self) -> Stats | None:
        """The statistics of our own steps."""
        if not self.steps:
            return None
        stats = Stats.of(self.steps)
        stats.seconds, stats.prefill_seconds = self.seconds, self.prefill_seconds
        stats.prefill_tokens = self.prefill_tokens
        return stats


@dataclass(frozen=True)
class Served:
    """The runs in the order of the prompts, and seconds from the first submission to the last token."""

    runs: list[Run]
    seconds: float


class Contender(Protocol):
    """Something that decodes prompts, one or several at a time."""

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Served:
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

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Served:
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

    def _serve(self, scheduler: Scheduler, requests: Sequence[Request]) -> Served:
        runs = [Run([], 0.0, prefill_tokens=len(request.prompt_ids) - 1) for request in requests]
        waiting = iter(zip(requests, runs, strict=True))
        in_progress: dict[Ticket, tuple[Run, float]] = {}

        def submit() -> None:
            if (upcoming := next(waiting, None)) is not None:
                in_progress[scheduler.submit(upcoming[0], self.drafter)] = (upcoming[1], time.perf_counter())

        began = time.perf_counter()
        for _ in range(scheduler.rows):
            submit()
        while scheduler.busy:
            steps = scheduler.tick()
            now = time.perf_counter()
            for ticket in in_progress:
                if ticket.error is not None:
                    raise ticket.error
            for ticket, step in steps:
                run, submitted = in_progress[ticket]
                run.add(now - submitted, step)
                if step.finish is not None:
                    run.prefill_seconds = ticket.prefill_seconds
                    del in_progress[ticket]
                    submit()
        return Served(runs, time.perf_counter() - began)
