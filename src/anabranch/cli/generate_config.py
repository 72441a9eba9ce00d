"""The options of ``anabranch generate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli import options

__all__ = ["GenerateConfig"]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The options of ``anabranch generate``."""

    prompt: Annotated[
        str | None, typer.Argument(help="the prompt, or - to read it from standard input", show_default=False)
    ] = None
    loading: options.Loading = field(default=options.Loading())
    drafter: options.DefaultDrafter = None
    system: options.System = None
    raw: options.Raw = False
    decoding: options.Decoding = field(default=options.Decoding())
    stop: options.Stop = ()
    stop_token_id: Annotated[
        tuple[int, ...], typer.Option(metavar="ID", help="end the text at this token; repeatable")
    ] = ()
    show_drafts: options.ShowDrafts = False
    compare: Annotated[bool, typer.Option("--compare", help="also measure the speedup over plain decoding")] = False
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="record every step in this file, for 'simulate'")
    ] = None
    every_position: Annotated[
        bool, typer.Option("--every-position", help="with --trace: record a draft at every token, verify none")
    ] = False
    force: options.Force = False
    as_json: options.AsJson = False
    streams: Annotated[
        bool, typer.Option("--stream", help="with --json: print a line of JSON for each chunk; the last has the result")
    ] = False
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help="answer each line instead (- is standard input), as lines of JSON"),
    ] = None
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="with --prompts: write the answers here; continues what is there"),
    ] = None
