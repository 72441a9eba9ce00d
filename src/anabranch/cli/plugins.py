"""The option --plugin: files that register drafters of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

__all__ = ["PLUGIN", "Plugins"]


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    """Register the methods of files, before other options name them."""
    for path in paths or ():
        from anabranch.methods import load_plugin

        load_plugin(path)
    return paths


PLUGIN: Any = typer.Option(
    "--plugin",
    metavar="FILE.py",
    is_eager=True,
    callback=_load_plugins,
    help="run this Python file first, which registers a drafter of your own (docs/methods.md); repeatable",
)
Plugins = Annotated[Optional[list[Path]], PLUGIN]  # noqa: UP045 - of a command without a configuration
