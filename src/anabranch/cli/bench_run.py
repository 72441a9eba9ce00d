"""``anabranch bench run`` and ``bench task``: one prompt at a time, decoded by all contenders in rotating order."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import completion, options
from anabranch.cli.bench_contenders import Contenders, command, entries_of, prepared
from anabranch.cli.layout import status_console
from anabranch.errors import CapabilityError, InputError
from anabranch.support.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch.bench.entries import Entry
    from anabranch.bench.session import Session
    from anabranch.bench.suites import Application

__all__ = ["RunConfig", "TaskConfig", "decode", "run", "stop_unmeasured", "task"]

LONGEST = 400  # characters of a prompt that are shown in a terminal


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files and formats of a result."""

    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the result to FILE.json, FILE.csv and FILE.md")
    ] = None
    figures: Annotated[bool, typer.Option("--figures", help="also draw figures, as FILE.*.png and .svg")] = False
    resume: Annotated[bool, typer.Option("--resume", help="continue the stopped run that was writing FILE")] = False
    force: options.Force = False
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="record our contenders' steps as DIR/LABEL.jsonl, for 'simulate': first runs only"
        ),
    ] = None
    as_json: options.AsJson = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options of ``bench run``."""

    contenders: Contenders = field(default=Contenders())
    every: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="LABEL=N", help="measure a slow contender on the first and every N-th prompt only; repeatable"
        ),
    ] = ()
    prompts: options.Prompts = field(default=options.Prompts())
    files: Files = field(default=Files())

    def strides(self, entries: Sequence[Entry], baseline: str | None) -> dict[str, int]:
        """The values of ``--every`` by label. Raises InputError for an invalid one, or one of plain decoding."""
        from anabranch.support.nearest import hint

        strides = {}
        for text in self.every:
            label, _, number = text.rpartition("=")
            names = [entry.name for entry in entries if entry.name != baseline]
            if label not in names:
                raise InputError(f"--every names no contender besides plain decoding: {text!r}{hint(label, names)}")
            if not (number.isascii() and number.isdigit() and int(number)):
                raise InputError(f"--every must be LABEL=N with a whole number from 1, got {text!r}")
            strides[label] = int(number)
        if strides and self.files.trace is not None:
            raise InputError("--trace records every prompt of all contenders; leave out --every or --trace")
        return strides


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The options of ``bench task``."""

    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="an application: sql, e2e, dialogsum or a JSONL file",
            autocompletion=completion.one_of("sql", "e2e", "dialogsum"),
        ),
    ]
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="read data sets here, as NAME/test.jsonl.gz")] = None
    split: Annotated[
        str, typer.Option(help="use the rows of train, validation, test, or all of a file of your own")
    ] = "test"
    limit: Annotated[int | None, typer.Option(help="use only this many rows, spread over the split")] = None
    prompt_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="write prompts like this, with fields of a row as {name} (default: the field prompt)"
        ),
    ] = None
    completion: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="the field of the completion, or of a list of them (default: completion)"),
    ] = None
    raw: options.Raw = False
    metric: Annotated[
        tuple[str, ...], typer.Option(help="score answers by exact_match, execution or rouge instead; repeatable")
    ] = ()
    examples: Annotated[int, typer.Option(help="show how this many of the answers were decoded")] = 1
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the tables and the examples as a web page")
    ] = None
    contenders: Contenders = field(default=Contenders())
    files: Files = field(default=Files())

    @property
    def prompts(self) -> options.Prompts:
        """The same as options of prompts."""
        return options.Prompts(
            task=(self.task,),
            data=self.data,
            split=self.split,
            limit=self.limit,
            prompt_template=self.prompt_template,
            completion=self.completion,
            raw=self.raw,
        )

    def application(self) -> Application:
        """The task to measure. Raises InputError, FileError or CapabilityError."""
        from anabranch.tasks import check_metrics

        application = self.prompts.application(self.metric)
        assert application is not None
        check_metrics(application.task.metrics)
        return application


def run(config: RunConfig) -> None:
    """Measure drafters and other engines on the same prompts, one prompt at a time.

    All contenders decode each prompt, in rotating order, before the next one. Speedups are relative to plain decoding
    (none) of the same prompts with the same weights, which is always measured too. Run nothing else at the same time.

    Ctrl-C keeps the results so far; --resume continues. 'bench compare' compares two results.
    """
    _run(config)


def task(config: TaskConfig) -> None:
    """Measure the speed of an application and the quality of its answers, and show how examples were decoded.

    As 'run', on the rows of TASK, with the scores of its metrics. 'bench table' puts the results of one task, for
    several models, into one table.
    """
    _run(config)


def _run(config: RunConfig | TaskConfig) -> None:
    from anabranch.bench.entries import plain_of
    from anabranch.bench.recordings import Recordings, recorded_places
    from anabranch.bench.session import Session

    contenders, files = config.contenders, config.files
    if isinstance(config, RunConfig) and config.prompts.of_task:
        task = config.prompts.task[0]
        raise InputError(f"--task needs --suite; measure the application {task!r} with 'bench task {task}'")
    entries = entries_of(contenders)
    _check(config)
    baseline = plain_of(entries, "none")
    every = config.strides(entries, baseline) if isinstance(config, RunConfig) else {}
    places = {}
    if files.trace is not None:
        places = recorded_places(files.trace, entries, resume=files.resume, force=files.force)
    application = config.application() if isinstance(config, TaskConfig) else None
    prompts = config.prompts.read() if application is None else application.prompts
    ready = prepared(contenders, config.prompts, prompts, entries)
    description = ready.description | {"baseline": baseline} | ({"every": every} if every else {})
    shown = config.examples if isinstance(config, TaskConfig) else 0
    if application is not None:
        description["application"] = application.described() | {"examples": shown}
    recorded = {name: value for name, value in ready.description.items() if name not in ("contenders", "repeats")}
    recordings = Recordings(places, {entry.name: entry.spec for entry in entries}, recorded)
    console = status_console()
    with Session(
        description,
        entries,
        ready.encoded,
        ready.loaded,
        contenders.sampling,
        console.print,
        recordings,
        shown,
    ) as session:
        interrupted = _measure(session, files, console)
        result = session.result(command()) | {"load_seconds": ready.load_seconds}
    if application is not None:
        _score(result, session, application)
    written = [] if files.out is None else _write(result, files.out, figures=files.figures)
    if application is not None and isinstance(config, TaskConfig) and config.html is not None:
        written.append(_write_page(config.html, result, session, application))
    if session.complete:
        session.forget()
    if files.as_json:
        print(json.dumps(result))
    else:
        _show(result)
        if application is not None:
            _show_examples(session, application)
    for path in [*written, *recordings.written]:
        console.print(f"wrote {path}")
    if interrupted:
        again = "add --resume to continue" if files.out is not None else "give --out FILE to be able to resume"
        kept = "the results so far are kept: " if files.out is not None else ""
        console.print(f"stopped after {result['prompts_done']} of {len(ready.encoded)} prompts; {kept}{again}")
        raise typer.Exit(INTERRUPTED)


def _check(config: RunConfig | TaskConfig) -> None:
    """Check numbers and files. Raises InputError or FileError."""
    from anabranch.bench.journal import Journal
    from anabranch.support.files import check_output, check_writable
    from anabranch.support.plots import check_matplotlib

    files = config.files
    if (files.figures or files.resume) and files.out is None:
        option = "--figures" if files.figures else "--resume"
        raise InputError(f"{option} needs --out FILE, since its files are next to it")
    options.check_at_least(1, max_new_tokens=config.contenders.max_new_tokens, repeats=config.contenders.repeats)
    if isinstance(config, TaskConfig):
        options.check_at_least(0, examples=config.examples)
        if config.html is not None:
            check_output(config.html, force=files.force or files.resume, what="the page", option="--html")
    if files.figures:
        check_matplotlib("or leave out --figures")
    if files.out is not None:
        check_writable(files.out)
        Journal.check(files.out, resume=files.resume, force=files.force)
        for path in _results(files.out, figures=files.figures):
            check_output(path, force=files.force or files.resume)


def _measure(session: Session, files: Files, console: Console) -> bool:
    """Serve all loads; returns whether that was interrupted. Raises CapabilityError if every contender failed."""
    interrupted = False
    try:
        session.prepare(files.out, resume=files.resume)
        session.open()
        decode(session, console, "prompts")
    except KeyboardInterrupt:
        if not session.done:
            session.forget()
            raise
        interrupted = True
    if len(session.failed) == len(session.entries) and not files.resume:  # else earlier results may be useful
        session.forget()
    stop_unmeasured(session)
    return interrupted


def stop_unmeasured(session: Session) -> None:
    """Raise CapabilityError if every contender failed."""
    if len(session.failed) == len(session.entries):
        why = "; ".join(f"{name}: {error}" for name, error in session.failed.items())
        raise CapabilityError(f"no contender could be measured ({why})")


def decode(session: Session, console: Console, loads: str) -> None:
    """Serve all loads, which are called ``loads``, showing progress and the estimated time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    already, began = len(session.done), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(loads))
    # loads take seconds to minutes, so the estimate is based on all of them
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=1e9,
        disable=not console.is_terminal,  # in a log, one line per load instead
    )
    with bar:
        line = bar.add_task("", total=len(session.loads), completed=already)

        def report(done: int, total: int, what: str) -> None:
            bar.update(line, completed=done, description=what)
            if not what and not console.is_terminal:
                left = (time.perf_counter() - began) / (done - already) * (total - done)
                console.print(f"{done}/{total} {loads}, about {left / 60:.1f} minutes left")

        session.decode(report)


# -- what is written -----------------------------------------------------------------------------------------------
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
        ".csv": sheet(result).csv(),
        ".md": markdown(result, [path.name for path in drawn if path.suffix == ".png"]),
    }
    for suffix, text in texts.items():
        write_atomically(beside(out, suffix), text)
    return [*(beside(out, suffix) for suffix in texts), *drawn]


def _show(result: dict[str, Any]) -> None:
    from anabranch.bench.report import DETAILS, heading, short_table, tables_of, verdict
    from anabranch.cli.layout import fits, output, print_tables

    show, contenders = output(), result["contenders"]
    show.print(f"{verdict(contenders)}.\n")
    print_tables([short_table(contenders, show.width)], show)
    show.print()
    for sentence in heading(result):
        show.print(sentence)
    hidden = 0
    for table in tables_of(result):
        if table.caption in DETAILS and not fits(table, show):
            hidden += 1
        else:
            show.print()
            print_tables([table], show)
    if hidden:
        show.print("\nA wider terminal shows more columns, and --out FILE writes all of them to FILE.md.")


# -- tasks ---------------------------------------------------------------------------------------------------------
def _score(result: dict[str, Any], session: Session, application: Application) -> None:
    """Add quality and extra parameters to the contenders of a result."""
    from anabranch.bench.quality import add_quality, extra_parameters

    tokenizer = session.target.tokenizer

    def text(ids: Any) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    add_quality(result["contenders"], session.answers(), application, text, baseline=session.baseline)
    entries = {entry.name: entry for entry in session.entries}
    for record in result["contenders"]:
        entry = entries[record["name"]]
        if entry.kind == "ours":
            record["extra_parameters"] = extra_parameters(entry.spec, session.loaded[entry.weights])


def _write_page(path: Path, result: dict[str, Any], session: Session, application: Application) -> Path:
    """Write the tables and the examples as a web page; returns its path."""
    from anabranch.bench.task_page import task_page
    from anabranch.support.files import write_atomically

    write_atomically(path, task_page(result, application, session.examples(), session.target.tokenizer))
    return path


def _show_examples(session: Session, application: Application) -> None:
    """Print the examples: prompt, reference, and the completion of each contender that drafts."""
    from anabranch.cli.layout import output
    from anabranch.cli.show import Marker, for_stdout
    from anabranch.cli.wrapping import wrapped
    from anabranch.decoding.stats import Stats

    console = output()
    for index, answers in enumerate(session.examples()):
        row = application.rows[index]
        prompt = textwrap.shorten(row.prompt, LONGEST, placeholder=" ...")
        console.print()
        console.print(for_stdout(f"Example {row.name}: {prompt}"))
        console.print(for_stdout(f"reference: {row.references[0]}"))
        for name, answer in answers.items():
            if not any(one.rejected or len(one.tokens) > 1 for one in answer.passes):
                continue
            marker = Marker(session.target.tokenizer)
            last = len(answer.passes) - 1
            text = "".join(
                marker.tokens(one.tokens, one.sources, last=place == last) for place, one in enumerate(answer.passes)
            )
            stats = answer.stats or Stats()
            # not the console's print, which would count the colours as characters
            print(wrapped(f"{name} (mean acceptance length {stats.mean_acceptance_length:.2f}): {text}"))
            print(marker.legend(stats))
