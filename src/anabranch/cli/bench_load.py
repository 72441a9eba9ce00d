"""``anabranch bench load``: throughput and latency with several concurrent prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.bench_contenders import Contenders, Out, command, entries_of, prepared
from anabranch.cli.bench_run import decode, stop_unmeasured
from anabranch.cli.layout import status_console
from anabranch.errors import CapabilityError, InputError
from anabranch.support.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from anabranch.bench.entries import Entry

__all__ = ["RowsConfig", "load"]

ROWS = (1, 4)


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """The options of ``bench load``."""

    rows: Annotated[
        tuple[int, ...], typer.Option(metavar="N", help="decode N prompts at a time; repeatable (default: 1 and 4)")
    ] = ()
    contenders: Contenders = field(default=Contenders())
    prompts: options.Prompts = field(default=options.Prompts())
    out: Out = None
    force: options.Force = False
    as_json: options.AsJson = False


def load(config: RowsConfig) -> None:
    """Measure throughput and latency with several concurrent prompts.

    N prompts are in progress at any time, until none is left; peers with static batches decode N prompts that start
    and end together. Ratios are relative to plain decoding with the same weights and the same number of rows.
    """
    from anabranch.bench.journal import beside
    from anabranch.bench.session import Session
    from anabranch.methods import AUTO
    from anabranch.support.files import check_output, check_writable, write_atomically

    contenders, rows = config.contenders, config.rows or ROWS
    options.check_at_least(1, max_new_tokens=contenders.max_new_tokens, repeats=contenders.repeats)
    out = None if config.out is None else beside(config.out, ".json")
    if out is not None:
        check_writable(out)
        check_output(out, force=config.force)
    entries = _batching(entries_of(contenders, [AUTO]), contenders)
    prompts = config.prompts.read()
    _check_rows(rows, len(prompts))
    ready = prepared(contenders, config.prompts, prompts, entries)
    description = ready.description | {"rows": list(rows)}
    console, interrupted = status_console(), False
    call = contenders.sampling
    with Session(description, entries, ready.encoded, ready.loaded, call, console.print, rows=rows) as session:
        session.prepare(None, resume=False)
        session.open()
        try:
            decode(session, console, "rounds")
        except KeyboardInterrupt:
            if not session.done:
                raise
            interrupted = True
        stop_unmeasured(session)
        result = session.rows_result(command()) | {"load_seconds": ready.load_seconds}
    if out is not None:
        write_atomically(out, json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {out}")
    if config.as_json:
        print(json.dumps(result))
    else:
        _show(result)
    if interrupted:
        console.print(f"stopped after {len(session.done)} of {len(session.loads)} rounds")
        raise typer.Exit(INTERRUPTED)


def _check_rows(rows: tuple[int, ...], prompts: int) -> None:
    """Check that there are enough prompts for these numbers of rows. Raises InputError."""
    options.check_at_least(1, rows=min(rows))
    if (most := max(rows)) > prompts:
        raise InputError(
            f"--rows {most} needs at least {most} prompts, got {prompts}; raise --limit, choose a larger --suite or "
            "lower --rows"
        )
    if len(set(rows)) < len(rows):
        raise InputError("--rows has a number twice; give each once")


def _batching(entries: list[Entry], config: Contenders) -> list[Entry]:
    """The contenders, without plain decoding that nothing is compared with.

    Raises CapabilityError for a peer that does not batch.
    """
    from anabranch.bench.entries import plain_of
    from anabranch.bench.peers import parse_peer

    for entry in entries:
        if entry.kind == "peer" and not parse_peer(entry.spec)[0].batches:
            raise CapabilityError(
                f"the peer {entry.name!r} decodes one prompt at a time here, so 'bench load' cannot measure it; leave "
                "it out, or measure the peer transformers"
            )
    plain = plain_of(entries, "none")
    compared = any(entry.weights == "none" and entry.name != plain for entry in entries)
    if config.loading.quantize in ("auto", "none") or compared:
        return entries
    return [entry for entry in entries if entry.name != plain]


def _show(result: Mapping[str, Any]) -> None:
    from anabranch.bench.report import rows_table
    from anabranch.cli.layout import output, print_tables

    run, where = result["run"], result["environment"]
    console = output()
    console.print(
        f"{run['suite']}: {run['prompts']} prompts, {run['max_new_tokens']} new tokens, {run['dtype']}, "
        f"{run['repeats']} repeat{'s' if run['repeats'] > 1 else ''}; model {run['model']}"
    )
    console.print(f"{where['date']}, {where['device']}, {where['processor']}, {where['threads']} threads")
    print_tables([rows_table(result["results"])], console)
