"""``anabranch tune``: find the drafter that this machine decodes fastest with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured
from anabranch.errors import InputError

if TYPE_CHECKING:
    from anabranch.loading import Loaded

__all__ = ["TuneConfig", "tune"]

SHOWN = 8  # candidates
NODES = (1, 4, 6, 8, 12, 16, 24, 32)  # columns of the table of step times
MARGIN = 64  # tokens beyond those decoded, for the widest drafts


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """The options of ``anabranch tune``."""

    loading: options.Loading = field(default=options.Loading())
    prompts: options.Prompts = field(default=options.Prompts(limit=12))
    max_new_tokens: options.NewTokens = 96
    figure: options.Figure = None
    force: Annotated[
        bool, typer.Option("--force", help="replace the figure; write a profile even if the machine was busy")
    ] = False
    dry: Annotated[bool, typer.Option("--dry", help="write no profile")] = False
    as_json: options.AsJson = False


@configured
def tune(config: TuneConfig) -> None:
    """Find the fastest drafter for this machine and these prompts, and remember it.

    Measures the latency of a step by drafted and verified nodes, records which drafts would have been accepted, picks
    the method and tree with the highest throughput, and checks the choice by decoding. From then on 'auto' means that
    drafter, for this model, adapter, number of threads and machine. Let nothing else run meanwhile.
    """
    from anabranch.files import check_output
    from anabranch.profiles import Situation, save_profile
    from anabranch.tune.figure import check_figure, draw
    from anabranch.tune.fit import fit

    options.check_at_least(1, limit=config.prompts.limit)
    options.check_at_least(8, max_new_tokens=config.max_new_tokens)
    if config.figure is not None:
        check_figure(config.figure)
        check_output(config.figure, force=config.force, what="the figure", option="--figure")
    suite = config.prompts.read()
    loaded = options.load(config.loading)
    prompts = _fitting([prompt.text for prompt in suite], loaded, config)
    adapter = next(iter(loaded.adapters), None)
    with _bar() as (bar, line):
        found = fit(
            loaded.target,
            None if adapter is None else adapter.adapter,
            prompts,
            max_new_tokens=config.max_new_tokens,
            report=lambda what, done, total: bar.update(line, description=what, completed=done, total=total),
        )
    record = _record(found, len(prompts), config.max_new_tokens)
    doubtful = found.doubtful and not config.force
    path = None
    if not (config.dry or doubtful):
        path = save_profile(Situation.of(loaded.target, adapter), found.spec, record)
    if config.as_json:
        print(json.dumps({"drafter": str(found.spec), "profile": None if path is None else str(path), **record}))
    else:
        _show(found, path)
    if config.figure is not None:  # last: by now the result is printed, whatever happens to the figure
        draw(found, config.figure)
    if doubtful:
        kept = "" if config.dry else ", so no profile was written (--force writes it)"
        print(
            f"{_disturbance(found)}: the choice may be wrong{kept}; tune again when nothing else runs", file=sys.stderr
        )
        raise typer.Exit(0 if config.dry else 1)


def _fitting(texts: Sequence[str], loaded: Loaded, config: TuneConfig) -> list[list[int]]:
    """The token ids of the prompts that leave enough positions. Raises InputError where none does."""
    from anabranch.prompts import chat_ids

    needed, limit = config.max_new_tokens + MARGIN, loaded.target.config.max_positions
    encoded = [chat_ids(loaded.target.tokenizer, text, raw=config.prompts.raw) for text in texts]
    fitting = [ids for ids in encoded if len(ids) + needed < limit]
    if not fitting:
        raise InputError(
            f"every prompt is too long: {needed} positions must be left of the model's {limit}, drafts included; give "
            "shorter ones, or lower --max-new-tokens"
        )
    return fitting


def _record(found: Any, prompts: int, max_new_tokens: int) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "predicted_tokens_per_second": round(found.prediction, 2),
        "interval_90": [round(value, 2) for value in found.interval],
        "measured_tokens_per_second": round(found.measured, 2),
        "plain_tokens_per_second": round(found.plain, 2),
        "predicted_plain_tokens_per_second": round(found.predicted_plain, 2),
        "speedup": round(found.speedup, 3),
        "drift": round(found.drift, 3),
        "doubtful": found.doubtful,
        "date": date.today().isoformat(),
        "step_ms": _tables(found.latency.rest),
        "draft_ms": _tables(found.latency.drafts),
        "costs": {method: str(costs) for method, costs in found.costs.items()},
        "candidates": [
            {
                "drafter": c.spec,
                "tokens_per_second": round(rate, 2),
                "tokens_a_step": round(p.mean_acceptance_length, 3),
            }
            for c, p, rate in found.tried
        ],
    }


def _tables(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {str(nodes): round(ms, 3) for nodes, ms in zip(table.widths, table.ms, strict=True)}
        for name, table in measured.items()
    }


def _show(found: Any, path: Path | None) -> None:
    """The choice and its speedup, then what led to it, in at most 60 columns unless a specification is longer."""
    print(f"{found.speedup:.2f}x with {found.chosen.spec}")
    if found.chosen.spec == "none":
        print("Plain decoding is the fastest here, so 'auto' decodes plainly.")
    low, high = found.interval
    print(f"measured   {found.measured:8.1f} tokens/s, plain decoding {found.plain:.1f}")
    print(f"predicted  {found.prediction:8.1f} tokens/s, 90 % interval {low:.1f} to {high:.1f}")
    if path is not None:
        print(f"written to {path}\nThe drafter 'auto' uses it from now on.")
    print(f"\n{'predicted':<40}{'tokens':>6}{'nodes':>6}{'tokens':>8}\n{'':<40}{'/step':>6}{'/step':>6}{'/s':>8}")
    for candidate, prediction, rate in sorted(found.tried, key=lambda item: -item[2])[:SHOWN]:
        nodes = prediction.draft_nodes / max(1, prediction.steps)
        print(f"{candidate.spec:<40}{prediction.mean_acceptance_length:6.2f}{nodes:6.1f}{rate:8.1f}")
    print(f"\n{'ms by nodes':<20}" + "".join(f"{n:>5}" for n in NODES))
    for what, measured in (("verify", found.latency.rest), ("draft", found.latency.drafts)):
        for name, table in measured.items():
            known = dict(zip(table.widths, table.ms, strict=True))
            cells = "".join(f"{known[n]:5.1f}" if n in known else " " * 5 for n in NODES)
            print(f"{f'{what} {name}':<20}{cells}".rstrip())


def _disturbance(found: Any) -> str:
    if found.latency.busy:
        return "the machine was busy: equal steps took very different times"
    return f"plain decoding was {found.drift:.2f} times as fast in the check as while steps were timed"


@contextmanager
def _bar() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task("tuning", total=None)
