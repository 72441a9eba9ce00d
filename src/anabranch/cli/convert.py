"""``anabranch convert``: make an adapter of draft heads that others published."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured
from anabranch.cli.layout import say
from anabranch.loading import LoadConfig

__all__ = ["ConvertConfig", "convert"]


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The options of ``anabranch convert``."""

    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="the published heads: a folder, or a .safetensors, .pt or .bin file"),
    ]
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="write the adapter here")]
    loading: LoadConfig = field(default=LoadConfig())
    licence: Annotated[str, typer.Option(help="record the licence of the heads")] = ""
    force: options.Force = False
    as_json: options.AsJson = False


@configured
def convert(config: ConvertConfig) -> None:
    """Make an adapter of draft heads that others published.

    The model must be the one that the heads were trained for. Nothing is trained or measured: the weights are checked,
    renamed and stored as an adapter, which --adapter then loads.
    """
    from anabranch.adapters.folder import CONFIG, TargetIdentity, save_adapter
    from anabranch.adapters.published import convert as run
    from anabranch.adapters.published import read_published
    from anabranch.errors import FileError
    from anabranch.support.files import check_folder, shown_command

    if (config.out / CONFIG).exists() and not config.force:
        raise FileError(f"{config.out} holds an adapter already; give another --out, or --force to replace it")
    published = read_published(config.source.expanduser())
    target = options.load(config.loading, pack=False, adapters=False).target
    made = run(published, target)
    check_folder(config.out, "the adapter", "folder (--out)")
    record = save_adapter(
        config.out,
        made.module,
        method=made.method,
        target=TargetIdentity.of(target),
        training={
            "command": shown_command("anabranch", *sys.argv[1:]),
            "converted from": f"{made.layout.name} heads in {published.source}",
            "licence": config.licence,
        },
        measured={},
        dtype=made.dtype,
    )
    if config.as_json:
        print(json.dumps({**record, "folder": str(config.out)}))
        return
    trained = made.method.trained
    assert trained is not None
    facts = f"{trained.describe(made.module.config)}, {record['parameters']:,} parameters, {record['bytes']:,} bytes"
    say(f"{made.layout.name} heads in {config.out}: {facts}")
    print(f"Next: anabranch chat --model {config.loading.model} --adapter {config.out} --drafter {made.method.name}")
