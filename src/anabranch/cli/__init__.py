"""The command line: one file per group of commands, with heavy imports inside them, so that --help imports no torch."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from anabranch.cli import bench, standard_streams, train
from anabranch.cli.certify import certify
from anabranch.cli.chat import chat
from anabranch.cli.convert import convert
from anabranch.cli.generate import generate
from anabranch.cli.help import HELP, Verb
from anabranch.cli.models import info, pull
from anabranch.cli.options import UsageError
from anabranch.cli.serve import serve
from anabranch.cli.show import Notices, labelled, show_warning
from anabranch.cli.simulate import simulate
from anabranch.cli.transcribe import transcribe
from anabranch.cli.tune import tune
from anabranch.errors import AnabranchError
from anabranch.support.interrupt import INTERRUPTED, TERMINATED, sigterm_raises

__all__ = ["app", "main"]

USAGE = 2

app = typer.Typer(
    name="anabranch",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Decode language models faster without changing their output.",
    **HELP,
)
for verb in (pull, generate, chat, transcribe, serve, info, convert, certify, tune, simulate):
    app.command(cls=Verb)(verb)
app.add_typer(bench.app, name="bench", cls=bench.Bench)
app.add_typer(train.app, name="train", cls=train.Methods)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"anabranch {version('anabranch')}")
        except PackageNotFoundError:
            typer.echo("anabranch, from a checkout that is not installed")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    Exit statuses: 1 for an error, with a one-sentence message; 2 for wrong usage; 130 for Ctrl-C, 143 for SIGTERM. With
    --json, standard output gets {"error": message, "kind": name of the error's class}, too.
    Both signals raise KeyboardInterrupt in the command, which keeps its results so far. 141 where the reader of
    standard output has ended, and 1 where that cannot be written for another reason.
    """
    standard_streams.prepare()
    for stream in (sys.stdout, sys.stderr):
        # characters that the terminal cannot show are replaced
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    warnings.showwarning = show_warning  # type: ignore[assignment]
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    with sigterm_raises() as received, Notices():
        code = _run(arguments, as_json=as_json)
    if code == INTERRUPTED:
        code = TERMINATED if received else INTERRUPTED
        print("\nstopped", file=sys.stderr)
    code, complaint = standard_streams.settle(code)
    if complaint:
        _complain(complaint)
    sys.exit(code)


def _run(arguments: Sequence[str] | None, *, as_json: bool) -> int:
    try:
        code = app(args=arguments, prog_name="anabranch", standalone_mode=False)
    except AnabranchError as error:
        _complain(str(error), type(error).__name__ if as_json else "")
        return USAGE if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as ended:  # rich raises it where the reader of standard output has ended
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except Exception as error:
        if isinstance(error, OSError) and standard_streams.unwritable() is not None:
            return 1
        # typer may use its own copy of click, so usage errors are recognised by their method
        if not hasattr(error, "format_message"):
            raise
        return _misused(error, as_json=as_json)
    return code if isinstance(code, int) else 0


def _misused(error: Any, *, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return USAGE
    context = getattr(error, "ctx", None)
    see = "" if context is None else f" (see '{context.command_path} --help')"
    _complain(str(error.format_message()).rstrip(".") + see, UsageError.__name__ if as_json else "")
    return int(getattr(error, "exit_code", USAGE))


def _complain(sentence: str, kind: str = "") -> None:
    """Print an error on standard error; with a ``kind``, also as JSON on standard output."""
    if kind:
        with suppress(OSError):
            print(json.dumps({"error": sentence, "kind": kind}), flush=True)
    labelled("error: ", "bold red", sentence)
