"""``anabranch.bench``: compare drafters on a model that is loaded already, with the loop of the command."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from anabranch.adapters.folder import LoadedAdapter
from anabranch.bench.entries import PLAIN, Entry, plain_of, read_entries
from anabranch.bench.report import short_table, verdict
from anabranch.bench.run import Encoded
from anabranch.bench.session import Session
from anabranch.bench.suites import SuitePrompt
from anabranch.bench.summary import CALL_KEYS
from anabranch.declared import Keywords, Rule, check
from anabranch.errors import CapabilityError, InputError
from anabranch.loading import Loaded
from anabranch.model.load import Target
from anabranch.prompts import Arrays, Ids, read_prompts

__all__ = ["BenchResult", "Measured", "bench"]

WIDTH = 80


class Model(Protocol):
    """The part of ``anabranch.Model`` that a comparison uses."""

    @property
    def target(self) -> Target:
        """The model whose output is reproduced."""

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Its adapters."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""


@dataclass(frozen=True)
class Measured:
    """One contender's figures over all prompts; docs/metrics.md defines them.

    name                    its label
    drafter                 its specification, with "auto" resolved
    tokens_per_second       new tokens over seconds, prompts included
    speedup                 (lower quartile, median, upper quartile) over prompts, relative to plain decoding
    mean_acceptance_length  tokens emitted per step of the target
    equal, prompts          prompts with the tokens of plain decoding, and all prompts
    calls                   target calls, draft calls and 10^6 bytes of weights read, per token
    error                   why it could not be measured; empty: it was
    """

    name: str
    drafter: str
    tokens_per_second: float = 0.0
    speedup: tuple[float, float, float] = (0.0, 0.0, 0.0)
    mean_acceptance_length: float = 0.0
    equal: int = 0
    prompts: int = 0
    calls: Mapping[str, float | None] | None = None
    error: str = ""


@dataclass(frozen=True)
class BenchResult:
    """The contenders in the order given, plain decoding among them. ``str`` gives a sentence and a table.

    records  all figures of each contender, as in a result file
    """

    contenders: tuple[Measured, ...]
    records: tuple[Mapping[str, Any], ...]

    def __getitem__(self, name: str) -> Measured:
        """The contender of a name. Raises KeyError."""
        for measured in self.contenders:
            if measured.name == name:
                return measured
        raise KeyError(name)

    @property
    def verdict(self) -> str:
        """One sentence: which contender is the fastest, and by how much."""
        return verdict(self.records)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, markup=False)
        console.print(f"{self.verdict}.\n")
        console.print(short_table(self.records, WIDTH).terminal())
        for measured in self.contenders:
            if measured.error:
                console.print(f"{measured.name} is not measured: {measured.error}")
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))

    def __repr__(self) -> str:
        return f"BenchResult({self.verdict!r})"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        failed = "".join(
            f"<p>{html.escape(f'{one.name} is not measured: {one.error}')}</p>" for one in self.contenders if one.error
        )
        return f"<p>{html.escape(self.verdict)}.</p>{short_table(self.records).html()}{failed}"


def bench(
    model: Model,
    prompts: str | Sequence[str] | Sequence[Ids] | Arrays,
    drafters: Sequence[str] | Mapping[str, str] = ("auto",),
    *,
    max_new_tokens: int = 128,
    repeats: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    rule: Rule = "match",
    report: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> BenchResult:
    """Compare drafters on the same prompts: all decode a prompt, in rotating order, before the next one.

    prompts   those of ``Model.generate``, one or several
    drafters  specifications, or specifications by label; plain decoding is always measured too
    repeats   how often each prompt is decoded by each drafter; rates are medians
    report    called with prompts done, prompts in total, and what is next

    The other options are those of ``Model.generate``, with the same defaults. Run nothing else at the same time, in
    this process either.

    Raises InputError for an invalid argument, and CapabilityError if no drafter can be measured. A drafter that fails
    has an ``error``, and the others are measured.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    call: Keywords = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "rule": rule,
    }
    check(call)
    entries = _entries(drafters)
    encoded = _encoded(model, prompts, max_new_tokens)
    run = {"max_new_tokens": max_new_tokens, "repeats": repeats}
    with Session(run, entries, encoded, {"none": Loaded(model.target, model.adapters)}, call) as session:
        session.open()
        session.decode(report)
        if len(session.failed) == len(entries):
            why = "; ".join(f"{name}: {error}" for name, error in session.failed.items())
            raise CapabilityError(f"no drafter could be measured ({why})")
        records = tuple(session.records())
    return BenchResult(tuple(map(_measured, records)), records)


def _entries(drafters: Sequence[str] | Mapping[str, str]) -> list[Entry]:
    """The contenders, plain decoding included. Raises InputError."""
    if isinstance(drafters, str):
        raise InputError(f"drafters must be a list of specifications, or a mapping by label; got {drafters!r}")
    if not isinstance(drafters, Mapping):
        entries = read_entries(list(map(str, drafters)), [])
    else:
        entries = [Entry(str(label), spec) for label, spec in drafters.items()]
        for entry in entries:
            read_entries([entry.spec], [])  # raises for one that does not exist
        if plain_of(entries, "none") is None:
            entries.insert(0, Entry(PLAIN, PLAIN))
    if other := [entry for entry in entries if entry.weights != "none"]:
        raise InputError(
            f"bench compares drafters on the loaded weights, got {other[0].name!r}; load the model with "
            f"quantize={other[0].weights!r}"
        )
    return entries


def _encoded(model: Model, prompts: Any, max_new_tokens: int) -> list[Encoded]:
    """The prompts with their token ids. Raises InputError."""
    _, rows = read_prompts(prompts, model.tokenizer)
    longest = model.target.config.max_positions
    for place, ids in enumerate(rows):
        if len(ids) + max_new_tokens > longest:
            raise InputError(
                f"prompt {place} has {len(ids)} tokens, too many for {max_new_tokens} more within the model's "
                f"{longest}; shorten it, or lower max_new_tokens"
            )
    return [(SuitePrompt(str(place), "prompts", ""), ids) for place, ids in enumerate(rows)]


def _measured(record: Mapping[str, Any]) -> Measured:
    name, drafter = str(record["name"]), str(record.get("drafter", record["spec"]))
    if "error" in record:
        return Measured(name, drafter, error=str(record["error"]))
    low, middle, high = record.get("speedup_quartiles") or (0.0, 0.0, 0.0)
    return Measured(
        name=name,
        drafter=drafter,
        tokens_per_second=float(record["tokens_per_second"]),
        speedup=(low, middle, high),
        mean_acceptance_length=float(record["mean_acceptance_length"]),
        equal=int(record.get("equal_outputs", 0)),
        prompts=int(record["prompts"]),
        calls={key: record.get(key) for key in CALL_KEYS},
    )
