"""A study, and the model and data that it runs on.

A study measures what a figure or table of the Speculative Streaming papers shows, on a target and size of one's choice.
Its ``measure`` returns JSON values; its ``table``, ``chart`` and ``headline`` read them from a result file, so that the
page can be written without the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from anabranch.adapters.folder import LoadedAdapter, load_adapter
from anabranch.bench.shapes import ROUNDS
from anabranch.bench.suites import Application, SuitePrompt, load_suite
from anabranch.decoding.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.learning.examples import Example
from anabranch.loading import LoadConfig, Loaded, load
from anabranch.methods import make_drafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.model.encoder import begun
from anabranch.model.load import Target
from anabranch.prompts import chat_ids
from anabranch.sampling import SamplingParams
from anabranch.tasks import TASKS

__all__ = ["Chart", "Line", "Result", "Setup", "Study", "Table", "rounded", "spread", "streams_of"]

Result = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[object]]]  # titles and rows
MOST_SERIES = 10


@dataclass(frozen=True)
class Setup:
    """The model and the data of a study.

    adapters  folders by label; without any, the adapter that ships for the target
    dtype     "": the study's own
    limit     prompts or texts
    new       tokens decoded per prompt
    steps     optimiser steps, in a study that trains
    rounds    of timed steps, in a study that times these
    draft     a smaller model, in a study of several
    table     a folder of n-gram counts, likewise
    lora      a LoRA that ``load`` merges into the model
    report    is told what is being done
    part      (name, measure) -> what ``measure`` returns, as JSON values; a stopped study continues with the first
              part that it had not measured
    """

    model: str = "default"
    dtype: str = ""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    suite: str = "own"
    data: Path | None = None
    limit: int = 12
    new: int = 96
    steps: int = 40
    rounds: int = ROUNDS
    draft: str = ""
    table: str = ""
    lora: Path | None = None
    report: Callable[[str], None] = lambda what: None
    part: Callable[[str, Callable[[], Any]], Any] = lambda name, measure: measure()

    def load(self, *, quantize: str = "auto", pack: bool = True, dtype: str = "auto") -> Loaded:
        """The target, with at most one adapter per method. ``dtype`` is the study's, if the setup has none."""
        folders = tuple(self.adapters.values())
        config = LoadConfig(self.model, adapters=folders, dtype=self.dtype or dtype, quantize=quantize, lora=self.lora)
        return load(config, pack=pack)

    def target(self, *, pack: bool = True, dtype: str = "auto") -> Target:
        """The target alone."""
        return load(LoadConfig(self.model, dtype=self.dtype or dtype), pack=pack, adapters=False).target

    def labelled(self, target: Target) -> dict[str, LoadedAdapter]:
        """The adapters given with ``--adapter``, of which several may belong to one method."""
        return {label: load_adapter(folder, target) for label, folder in self.adapters.items()}

    @cached_property
    def prompts(self) -> list[SuitePrompt]:
        """The suite's prompts."""
        return load_suite(self.suite, data=self.data, limit=self.limit)

    @cached_property
    def application(self) -> Application:
        """The suite's rows, where it is a task: test rows, or all rows of a file."""
        split = "test" if self.suite in TASKS else "all"
        return Application.read(self.suite, data=self.data, split=split, limit=self.limit)

    def encoded(self, target: Target, prompts: Sequence[SuitePrompt] | None = None) -> list[list[int]]:
        """Prompts (None: the suite's) in the target's chat template."""
        asked = self.prompts if prompts is None else prompts
        return [list(chat_ids(target.tokenizer, prompt.asked, model=target.name)) for prompt in asked]

    @property
    def shown_draft(self) -> str:
        """The smaller model's name, without its folder."""
        return Path(self.draft).name

    def answers(self, *, temperature: float = 0.0) -> list[Example]:
        """The target's own completions of the prompts, decoded plainly with packed weights as stored."""
        target = load(LoadConfig(self.model), adapters=False).target
        prompts = self.encoded(target)
        engine = Engine(
            target.decoder, make_drafter("none", target.decoder), capacity=max(map(len, prompts)) + self.new
        )
        stop = frozenset(target.config.eos_token_ids)
        found = []
        for number, ids in enumerate(prompts, 1):
            self.report(f"completion {number} of {len(prompts)}")
            sampling = SamplingParams(temperature=temperature, seed=number)
            begin, source = begun(target.config, ids)
            engine.add(Request(begin, self.new, sampling, stop_ids=stop, source=source))
            found.append(Example(tuple(ids), tuple(token for step in engine.run() for token in step.tokens)))
        return [example for example in found if len(example.answer_ids) > 1]


def streams_of(loaded: Loaded) -> StreamAdapter:
    """The streams adapter of a target. Raises InputError if there is none."""
    for found in loaded.adapters:
        if isinstance(found.module, StreamAdapter):
            return found.module
    raise InputError("the study needs a streams adapter for this target; give one with --adapter FOLDER")


@dataclass(frozen=True)
class Line:
    """A series of a figure; of a bar chart, one bar for each of ``x``."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure of up to ten series with one pair of axes."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    kind: Literal["lines", "bars"] = "lines"
    log: bool = False

    def __post_init__(self) -> None:
        assert 0 < len(self.lines) <= MOST_SERIES, f"{len(self.lines)} series"


@dataclass(frozen=True)
class Study:
    """One study.

    papers    the figure or table, as the page names it
    measures  what is measured
    paper     what the paper shows, with the values that it prints
    differs   what differs from the paper's experiment
    ours      (result) -> our value in a few words
    table     (result) -> the numbers
    chart     (result) -> the figure; None: no figure
    measure   (setup) -> the numbers as JSON values; None: a script of its own measures it (``command``)
    suite     the default suite; "" if the study needs no prompts
    limit     the default number of prompts
    command   how to run it, if not by ``research/study.py``
    whole     show a long table too, beside a chart of a part of it
    """

    name: str
    papers: str
    title: str
    measures: str
    paper: str
    differs: str
    ours: Callable[[Result], str]
    table: Callable[[Result], Table]
    chart: Callable[[Result], Chart] | None = None
    measure: Callable[[Setup], dict[str, Any]] | None = None
    suite: str = ""
    limit: int = 12
    new: int = 96
    command: str = ""
    whole: bool = False

    @property
    def pattern(self) -> str:
        """A glob of the study's result files in benchmarks/."""
        return f"study-{self.name}-*.json" if self.measure is not None else f"{self.name.replace('_', '-')}-*.json"

    @property
    def shown_command(self) -> str:
        """The command that runs it."""
        data = " --data DIR" if self.suite not in ("", "own") or self.name == "peeking" else ""
        return (
            self.command or f"python research/study.py {self.name}{data} --out benchmarks/study-{self.name}-DATE.json"
        )


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    """As stored in results."""
    return [round(float(value), digits) for value in values]


def spread(values: Sequence[float] | None) -> str:
    """The middle of three values, the others behind it."""
    return "-" if values is None else f"{values[1]:.2f} ({values[0]:.2f}-{values[2]:.2f})"
