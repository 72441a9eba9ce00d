"""The command line: one file a group of verbs. Heavy imports happen inside the verbs, so that --help is fast."""

from __future__ import annotations

import sys

import typer

from anabranch.cli import train
from anabranch.cli.bench import bench
from anabranch.cli.certify import certify
from anabranch.cli.models import info, pull
from anabranch.cli.text import chat, generate
from anabranch.errors import AnabranchError

__all__ = ["app", "main"]

app = typer.Typer(
    name="anabranch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decode language models faster without changing what they say.",
)
for verb in (pull, generate, chat, info, certify, bench):
    app.command()(verb)
app.add_typer(train.app, name="train")


def main() -> None:
    """Run a verb; a user's mistake ends in one sentence and exit code 1, Ctrl-C in 130."""
    try:
        app()
    except AnabranchError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, soft_wrap=True).print(
            Text("error: ", style="bold red") + Text(str(error), style="default")
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
