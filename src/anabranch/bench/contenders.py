"""Contenders: our drafters on our engine. Other engines are in ``peers``, each in its own process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.control.controller import Controller
from anabranch.decoding.batch import CHUNK
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.drafting.drafter import Drafter
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams
from anabranch.verify import Rule

__all__ = ["Contender", "Ours", "Run"]


@dataclass
class Run:
    """The result of decoding a prompt: new token ids, seconds from the call to the last token, and our own steps.

    first_token_seconds  from the call to the first new token; None if a peer does not report it
    """

    token_ids: list[int]
    seconds: float
    prefill_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    first_token_seconds: float | None = None
    prefill_tokens: int = 0


class Contender(Protocol):
    """Something that decodes a prompt."""

    name: str

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        """Decode as configured, up to the end token or ``max_new_tokens``."""


class Ours:
    """One drafter on an engine that is reused for all prompts.

    spec         its specification, "auto" resolved
    controller  the controller of an adaptive drafter; None: the engine's own
    rule         how drafts are verified
    """

    def __init__(
        self,
        name: str,
        target: Target,
        drafter: Drafter,
        *,
        capacity: int,
        sampling: SamplingParams,
        spec: str = "",
        controller: Controller | None = None,
        rule: Rule = "match",
    ) -> None:
        self.name, self.sampling, self.spec, self.rule = name, sampling, spec, rule
        self.engine = Engine(target.decoder, drafter, capacity=capacity, controller=controller)
        self.stop = frozenset(target.config.eos_token_ids)

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        """Decode one prompt."""
        request = Request(prompt_ids, max_new_tokens, self.sampling, self.stop, self.rule)
        self.engine.rehearse(request)
        began = time.perf_counter()
        self.engine.add(request, prefill=CHUNK)
        steps = self.engine.step()
        first = time.perf_counter()
        prefilled = first - steps[0].timings.total
        steps += self.engine.run()
        done = time.perf_counter()
        tokens = [token for step in steps for token in step.tokens]
        return Run(tokens, done - began, prefilled - began, steps, first - began, len(prompt_ids) - 1)
