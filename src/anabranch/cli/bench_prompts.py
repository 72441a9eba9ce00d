"""``anabranch bench`` with one prompt at a time, decoded by all contenders in rotating order."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli import bench_task, options
from anabranch.cli.bench_config import (
    BenchConfig,
    command,
    described,
    encode,
    entries_of,
    load,
)
from anabranch.cli.layout import status_console
from anabranch.cli.options import check_at_least
from anabranch.errors import CapabilityError, InputError
from anabranch.support.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch.bench.entries import Entry
    from anabranch.bench.session import Session

__all__ = ["run"]

OF_SHAPES = ("width", "batch", "context_tokens")


def run(config: BenchConfig, given: Mapping[str, str]) -> None:
    """Check the options before loading, measure, print the result, and write it to ``--out``."""
    from anabranch.bench.entries import plain_of
    from anabranch.bench.recordings import Recordings, recorded_places
    from anabranch.bench.session import Session
    from anabranch.model.quantize import QUANTIZATIONS

    if shaped := [written for name, written in given.items() if name in OF_SHAPES]:
        raise InputError(f"{shaped[0]} needs --shape; give both, or leave it out")
    entries = entries_of(config)
    _check(config)
    places = {}
    if config.trace is not None:
        places = recorded_places(config.trace, entries, resume=config.resume, force=config.force)
    application = config.application()
    prompts = config.prompts.read() if application is None else application.prompts
    weights = load(config, [k for k in QUANTIZATIONS if k == "none" or any(entry.weights == k for entry in entries)])
    encoded = encode(config, prompts, weights.first)
    description = described(config, entries, encoded, weights.first)
    described_run = description | {"baseline": plain_of(entries, "none")}
    if application is not None:
        described_run["application"] = application.described() | {"examples": config.examples}
    recorded = {name: value for name, value in description.items() if name not in ("contenders", "repeats")}
    recordings = Recordings(places, {entry.name: entry.spec for entry in entries}, recorded)
    console = status_console()
    shown = 0 if application is None else config.examples
    with Session(
        described_run,
        entries,
        encoded,
        weights.loaded,
        options.params(config.sampling),
        console.print,
        recordings,
        shown,
    ) as session:
        interrupted = _measure(session, config, entries, console)
        result = session.result(command()) | {"load_seconds": weights.load_seconds}
    if application is not None:
        bench_task.score(result, session, application, weights)
    written = [] if config.out is None else _write(result, config.out, figures=config.figures)
    if application is not None and config.html is not None:
        written.append(bench_task.write_page(config.html, result, session, application))
    if session.complete:
        session.forget()
    _show(result, config)
    if application is not None and not config.as_json:
        bench_task.show_examples(session, application)
    for path in [*written, *recordings.written]:
        console.print(f"wrote {path}")
    if interrupted:
        again = "add --resume to continue" if config.out is not None else "give --out FILE to be able to resume"
        done = f"stopped after {result['prompts_done']} of {len(encoded)} prompts"
        console.print(f"{done}; {'the results so far are kept: ' if config.out is not None else ''}{again}")
        raise typer.Exit(INTERRUPTED)


def _check(config: BenchConfig) -> None:
    """Check numbers and files. Raises InputError or FileError."""
    from anabranch.bench.journal import Journal
    from anabranch.support.files import check_output, check_writable
    from anabranch.support.plots import check_matplotlib

    if (config.figures or config.resume) and config.out is None:
        option = "--figures" if config.figures else "--resume"
        raise InputError(f"{option} needs --out FILE, since its files are next to it")
    check_at_least(1, max_new_tokens=config.max_new_tokens, repeats=config.repeats)
    check_at_least(0, examples=config.examples)
    if config.html is not None:
        check_output(config.html, force=config.force or config.resume, what="the page", option="--html")
    if config.figures:
        check_matplotlib("or leave out --figures")
    if config.out is not None:
        check_writable(config.out)
        Journal.check(config.out, resume=config.resume, force=config.force)
        for path in _results(config.out, figures=config.figures):
            check_output(path, force=config.force or config.resume)


def _measure(session: Session, config: BenchConfig, entries: list[Entry], console: Console) -> bool:
    """Decode all prompts; returns whether that was interrupted. Raises CapabilityError if every contender failed."""
    interrupted = False
    try:
        _decode(session, config, console)
    except KeyboardInterrupt:
        if not session.done:
            session.forget()
            raise
        interrupted = True
    if len(session.failed) == len(entries):
        if not config.resume:  # earlier results may still be useful
            session.forget()
        why = "; ".join(f"{name}: {error}" for name, error in session.failed.items())
        raise CapabilityError(f"no contender could be measured ({why})")
    return interrupted


def _decode(session: Session, config: BenchConfig, console: Console) -> None:
    """Measure the machine, open the contenders and decode, showing progress and the estimated time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    session.prepare(config.out, resume=config.resume)
    session.open()
    already, began = len(session.done), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"))
    # prompts take seconds to minutes, so the estimate is based on all of them
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=1e9,
        disable=not console.is_terminal,  # in a log, one line per prompt instead
    )
    with bar:
        line = bar.add_task("", total=len(session.prompts), completed=already)

        def report(done: int, total: int, what: str) -> None:
            bar.update(line, completed=done, description=what)
            if not what and not console.is_terminal:
                left = (time.perf_counter() - began) / (done - already) * (total - done)
                console.print(f"{done}/{total} prompts, about {left / 60:.1f} minutes left")

        session.decode(report)


def _results(out: Path, *, figures: bool) -> list[Path]:
    """The files that a run writes, as far as they are known in advance, and the figures that it may replace."""
    from anabranch.bench.journal import FORMATS, beside

    files = [beside(out, suffix) for suffix in FORMATS]
    if figures and out.parent.is_dir():
        stem = beside(out, ".").name
        files += sorted(
            path for path in out.parent.iterdir() if path.name.startswith(stem) and path.suffix in (".png", ".svg")
        )
    return files


def _write(result: dict[str, Any], out: Path, *, figures: bool) -> list[Path]:
    from anabranch.bench.figures import save_figures
    from anabranch.bench.journal import beside
    from anabranch.bench.report import markdown, sheet
    from anabranch.support.files import write_atomically

    drawn = save_figures(result, out) if figures else []
    texts = {
        ".json": json.dumps(result, indent=1) + "\n",
        ".csv": sheet(result),
        ".md": markdown(result, [path.name for path in drawn if path.suffix == ".png"]),
    }
    for suffix, text in texts.items():
        write_atomically(beside(out, suffix), text)
    return [*(beside(out, suffix) for suffix in texts), *drawn]


def _show(result: dict[str, Any], config: BenchConfig) -> None:
    from anabranch.bench.report import DETAILS, heading, tables
    from anabranch.bench.verdict import short_table, verdict
    from anabranch.cli.layout import fits, output, print_tables

    if config.as_json:
        print(json.dumps(result))
        return
    show, contenders = output(), result["contenders"]
    show.print(f"{verdict(contenders)}.\n")
    print_tables([short_table(contenders, show.width)], show)
    show.print()
    for sentence in heading(result):
        show.print(sentence)
    found = tables(result)
    hidden = [table for table in found if f"{table.title}".strip() in DETAILS and not fits(table, show)]
    print_tables([table for table in found if table not in hidden], show)
    if hidden:
        show.print("\nA wider terminal shows more columns, and --out FILE writes all of them to FILE.md.")
