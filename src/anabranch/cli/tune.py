"""``anabranch tune``: find the fastest drafter for this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured
from anabranch.errors import InputError
from anabranch.loading import LoadConfig

if TYPE_CHECKING:
    from anabranch.loading import Loaded
    from anabranch.prompts import TextOrMessages
    from anabranch.tune.fit import Fit

__all__ = ["TuneConfig", "tune"]

PROMPTS = 12  # without --limit
SHOWN = 8  # candidates
NODES = (1, 4, 6, 8, 12, 16, 24, 32)  # columns of the table of step times
MARGIN = 64  # positions beyond the decoded tokens, for the largest drafts


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """The options of ``anabranch tune``."""

    loading: LoadConfig = field(default=LoadConfig())
    prompts: options.Prompts = field(default=options.Prompts())
    max_new_tokens: options.NewTokens = 96
    figure: options.Figure = None
    force: Annotated[
        bool, typer.Option("--force", help="replace the figure; write a profile even if the machine was busy")
    ] = False
    forget: Annotated[bool, typer.Option("--forget", help="delete the profile of this model and machine")] = False
    dry: Annotated[bool, typer.Option("--dry", help="write no profile")] = False
    as_json: options.AsJson = False


@configured
def tune(config: TuneConfig) -> None:
    """Find the fastest drafter for this machine and these prompts, and remember it.

    Measures the latency of a step by drafted and verified nodes, records which drafts would have been accepted, and
    decodes with the drafter of the highest predicted throughput, with 'auto' and with plain decoding to compare them.
    From then on 'auto' uses the measured costs, for this model, adapter, number of threads and machine. If another
    drafter was more than 3 % faster than 'auto', single prompts are drafted with it unless --drafter names one. With
    adapters of several methods, it tries each and 'auto' starts with the fastest. 12 prompts are enough, so that is
    the default of --limit. Run nothing else at the same time.
    """
    from anabranch.cli.show import name_defaults
    from anabranch.control.profiles import Situation, keep_tuned, save_profile
    from anabranch.methods import AUTO
    from anabranch.support.files import check_output
    from anabranch.tune.figure import check_figure, draw
    from anabranch.tune.fit import fit

    options.check_at_least(1, limit=config.prompts.limit)
    options.check_at_least(8, max_new_tokens=config.max_new_tokens)
    if config.figure is not None:
        check_figure(config.figure)
        check_output(config.figure, force=config.force, what="the figure", option="--figure")
    if config.forget:
        print(_forgotten(Situation.of((loaded := options.load(config.loading)).target, loaded.adapters).path()))
        return
    suite = config.prompts.read(limit=PROMPTS)
    loaded = options.load(config.loading)
    loaded.target.check_decoder_only("tuning")
    name_defaults(loaded.target)
    prompts = _fitting([prompt.asked for prompt in suite], loaded, config)
    with _bar() as (bar, line):
        fitted = fit(
            loaded.target,
            loaded.modules,
            prompts,
            max_new_tokens=config.max_new_tokens,
            report=lambda what, done, total: bar.update(line, description=what, completed=done, total=total),
        )
    record = fitted.record(prompts=len(prompts), max_new_tokens=config.max_new_tokens)
    doubtful = fitted.doubtful and not config.force
    path = None
    if not (config.dry or doubtful):
        situation = Situation.of(loaded.target, loaded.adapters)
        path = save_profile(situation, costs=fitted.costs, drafter=str(fitted.spec), record=record)
        if len(fitted.choices) > 1:
            keep_tuned(situation, {str(each): rate / fitted.plain for each, rate in fitted.choices.items()})
    if config.as_json:
        result = {"drafter": str(fitted.spec), "costs": fitted.costs, "profile": None if path is None else str(path)}
        print(json.dumps(result | record))
    else:
        _show(fitted, path)
    if path is not None and fitted.default != AUTO:
        print(
            f"auto was {100 * (1 - 1 / fitted.lead):.0f} % slower than {fitted.spec}, which single prompts use from "
            "now on; --drafter auto chooses auto, and 'anabranch tune --forget' deletes this profile",
            file=sys.stderr,
        )
    if config.figure is not None:  # last, so that the result is printed even if this fails
        draw(fitted, config.figure)
    if doubtful:
        kept = "" if config.dry else ", so no profile was written (--force writes it)"
        print(
            f"{_disturbance(fitted)}: the choice may be wrong{kept}; tune again when nothing else runs", file=sys.stderr
        )
        raise typer.Exit(0 if config.dry else 1)


def _forgotten(path: Path) -> str:
    """Delete a profile, if there is one; returns what was done."""
    if not path.is_file():
        return "there is no profile of this model on this machine"
    path.unlink()
    return f"deleted {path}"


def _fitting(texts: Sequence[TextOrMessages], loaded: Loaded, config: TuneConfig) -> list[list[int]]:
    """The token ids of the prompts that are short enough. Raises InputError if there is none."""
    from anabranch.prompts import chat_ids

    needed, limit = config.max_new_tokens + MARGIN, loaded.target.config.max_positions
    encoded = [chat_ids(loaded.target.tokenizer, text, raw=config.prompts.raw) for text in texts]
    fitting = [ids for ids in encoded if len(ids) + needed < limit]
    if not fitting:
        raise InputError(
            f"every prompt is too long: {needed} of the model's {limit} positions must be free for new tokens and "
            "drafts; give shorter ones, or lower --max-new-tokens"
        )
    return fitting


def _show(fitted: Fit, path: Path | None) -> None:
    """Print the choice and its speedup, then the measurements."""
    from anabranch.cli.layout import print_tables
    from anabranch.support.table import Table

    print(f"{fitted.speedup:.2f}x with {fitted.spec}")
    if fitted.spec.plain:
        print("Plain decoding is the fastest here.")
    low, high = fitted.interval
    print(f"{fitted.plain:8.1f} tokens/s measured with plain decoding")
    for each, rate in fitted.choices.items():
        print(f"{rate:8.1f} tokens/s measured with {'auto' if len(fitted.choices) == 1 else each}")
    if fitted.predicted.spec not in (*fitted.choices, fitted.tried[0].candidate.spec):
        print(f"{fitted.measured:8.1f} tokens/s measured with {fitted.predicted.spec}")
    print(f"{fitted.prediction:8.1f} tokens/s predicted for {fitted.predicted.spec}")
    print(f"{'':<8} 90 % interval {low:.1f} to {high:.1f}")
    if path is not None:
        print(f"written to {path}\nThe drafter 'auto' starts from these costs from now on.")
    predicted = []
    for one in sorted(fitted.tried, key=lambda one: -one.rate)[:SHOWN]:
        nodes = one.prediction.draft_nodes / max(1, one.prediction.steps)
        length = one.prediction.mean_acceptance_length
        predicted.append((str(one.candidate.spec), f"{length:.2f}", f"{nodes:.1f}", f"{one.rate:.1f}"))
    times = []
    for group, measured in fitted.times.groups.items():
        for what, widths in (("verify", measured.passes), ("draft", measured.draft)):
            if widths is not None:
                known = dict(zip(widths.widths, widths.ms, strict=True))
                times.append((f"{what} {group}", *(f"{known[n]:.1f}" if n in known else "" for n in NODES)))
    print()
    print_tables([Table(("predicted", "tokens\n/step", "nodes\n/step", "tokens\n/s"), predicted)])
    print()
    print_tables([Table(("ms by nodes", *map(str, NODES)), times)])


def _disturbance(fitted: Fit) -> str:
    if fitted.times.busy:
        return "the machine was busy: equal steps took very different times"
    return f"plain decoding was {fitted.drift:.2f} times as fast in the check as while steps were timed"


@contextmanager
def _bar() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task("tuning", total=None)
