"""Training data that nobody has to bring: a target writes prompts and answers them, until a budget of answer tokens.

FOLDER/prompts.jsonl   the prompts, those that were dropped included (train.self_prompts)
FOLDER/answers.jsonl   their completions (train.answers)

Both grow in rounds: how many prompts the budget needs is only known once some are answered. A run may stop at any time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import CapabilityError, InputError
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams
from anabranch.support.appended import agree
from anabranch.support.files import check_folder
from anabranch.support.jsonfiles import read_rows
from anabranch.train.answers import answer_settings, check_out, read_prompts, write_answers
from anabranch.train.self_prompts import PromptProgress, check_prompts, write_prompts

__all__ = ["DataProgress", "SelfData", "check_self_data", "write_self_data"]

FIRST_ROUND = 4  # prompts a row in the first round


@dataclass(frozen=True)
class SelfData:
    """Amount and form of the data to write.

    tokens          answer tokens in total
    rows            sequences decoded at a time
    temperature     of the answers; 0: greedy
    max_new_tokens  maximum length of an answer
    seed            of the prompts, and of sampled answers
    """

    tokens: int = 250_000
    rows: int = 64
    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        _ = self.sampling

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of answers. Raises InputError for a temperature below 0."""
        return SamplingParams(temperature=self.temperature, seed=self.seed if self.temperature else 0)


@dataclass(frozen=True)
class DataProgress:
    """Answer tokens in the file and wanted, the counts of prompts, and the estimated seconds left to write the rest.

    stage              what is being written: "prompts" or "answers"
    answers            in the file
    dropped            prompts by reason
    tokens_per_second  of what is being written
    """

    stage: str
    tokens: int
    wanted: int
    answers: int
    kept: int
    sampled: int
    dropped: Mapping[str, int]
    tokens_per_second: float
    seconds_left: float


def check_self_data(folder: Path) -> None:
    """Check that the files in ``folder`` can be written or resumed, before a model is loaded. Raises FileError."""
    check_folder(folder, "the data", "folder (--out)")
    check_prompts(folder / "prompts.jsonl")
    check_out(folder / "answers.jsonl", folder / "prompts.jsonl")


def write_self_data(
    target: Target, folder: Path, plan: SelfData, *, report: Callable[[DataProgress], None] | None = None
) -> Path:
    """Write prompts and answers until ``plan.tokens`` answer tokens are in ``folder``; returns the file of answers.

    Nothing is written if they are there already. Raises what ``write_prompts`` and ``write_answers`` raise, and
    CapabilityError if the target's answers are empty.
    """
    prompts, out = folder / "prompts.jsonl", folder / "answers.jsonl"
    agree(out, answer_settings(target, plan.max_new_tokens, plan.sampling))  # before more prompts are written
    clock = _Clock(plan.tokens, report or (lambda _: None))
    clock.begin(*_counted(out))
    while clock.tokens < plan.tokens:
        before = clock.tokens
        write_prompts(
            target, prompts, _needed(plan, clock), rows=plan.rows, seed=plan.seed, report=clock.prompts_written
        )
        write_answers(
            target,
            read_prompts(prompts, target.tokenizer),
            out,
            rows=plan.rows,
            max_new_tokens=plan.max_new_tokens,
            sampling=plan.sampling,
            report=lambda now: clock.answers_written(now.answers, now.tokens, now.tokens_per_second),
        )
        clock.tokens, clock.answers = _counted(out)
        if clock.tokens == before:
            raise CapabilityError(
                f"{target.name} answers its own prompts with nothing; give prompts and completions (--answers)"
            )
    return out


def _needed(plan: SelfData, clock: _Clock) -> int:
    """Estimate the number of prompts whose answers have as many tokens as are wanted."""
    first = FIRST_ROUND * plan.rows
    if not clock.answers:
        return min(first, math.ceil(plan.tokens / plan.max_new_tokens))  # so few are certainly needed
    each = clock.tokens / clock.answers
    return clock.answers + math.ceil((plan.tokens - clock.tokens) / each)


def _counted(out: Path) -> tuple[int, int]:
    """The tokens and the number of the answers in a file."""
    if not out.is_file():
        return 0, 0
    lengths = [len(record["answer_ids"]) for _, record in read_rows(out)]
    return sum(lengths), len(lengths)


class _Clock:
    """Turns the progress of prompts and of answers into that of the whole."""

    def __init__(self, wanted: int, report: Callable[[DataProgress], None]) -> None:
        self.wanted, self.report = wanted, report
        self.tokens = self.answers = 0
        self.prompts: Any = None
        self.began = time.monotonic()

    def begin(self, tokens: int, answers: int) -> None:
        """Start from the counts of an earlier run."""
        self.tokens = self.first = tokens
        self.answers = answers

    def _left(self, tokens: int) -> float:
        new = tokens - self.first
        return (time.monotonic() - self.began) / new * max(0, self.wanted - tokens) if new > 0 else 0.0

    def prompts_written(self, now: PromptProgress) -> None:
        """After a prompt."""
        self.prompts = now
        self._say("prompts", self.tokens, self.answers, now.tokens_per_second)

    def answers_written(self, answers: int, tokens: int, speed: float) -> None:
        """After an answer; ``tokens`` are those of this round."""
        self._say("answers", self.tokens + tokens, answers, speed)

    def _say(self, stage: str, tokens: int, answers: int, speed: float) -> None:
        prompts: PromptProgress = self.prompts or PromptProgress(answers, answers, answers, {}, 0, 0.0, 0.0)
        self.report(
            DataProgress(
                stage,
                tokens,
                self.wanted,
                answers,
                prompts.kept,
                prompts.sampled,
                prompts.dropped,
                speed,
                self._left(tokens),
            )
        )
