"""``anabranch train COMMAND`` for methods that draft from tables: builds the tables and prints how to use them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import extended
from anabranch.loading import LoadConfig
from anabranch.methods import TRAININGS, training

__all__ = ["TablesConfig", "table_command"]


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """The options of a command that builds tables, apart from those of the tables themselves."""

    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="build from the JSONL that 'train answers' wrote")
    ] = None
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="build from a text file, or JSONL with a field 'text', instead")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write here (default: where the drafter looks by itself)"),
    ] = None
    loading: LoadConfig = field(default=LoadConfig())
    licence: Annotated[str, typer.Option(help="record the licence of the data")] = ""
    force: Annotated[bool, typer.Option("--force", help="replace tables in --out")] = False
    as_json: options.AsJson = False


def table_command(command: str) -> Any:
    """The command that builds a method's tables."""
    method, _ = TRAININGS[command]
    of = training(command)

    help = f"""Build {of.title} from text, for the drafter '{method}'.

    It serves every model with the same tokenizer. A build that is interrupted leaves nothing behind.
    """
    return extended(command, partial(_build, method), TablesConfig, of, help)


def _build(name: str, config: TablesConfig, given: dict[str, Any]) -> None:
    from anabranch.cli.screen import screen
    from anabranch.drafting.tables import Tokenizer, build_tables, check_free, default_folder
    from anabranch.errors import FileError
    from anabranch.methods import methods
    from anabranch.model.load import base_name
    from anabranch.model.text import fingerprint
    from anabranch.support.files import check_folder, shown_command
    from anabranch.train.documents import read_documents
    from anabranch.train.job import check_data

    method = next(method for method in methods() if method.name == name)
    tables = method.tables
    assert tables is not None
    check_data(config.answers, config.text)
    if config.out is not None:
        check_free(config.out, force=config.force)
        if config.out.absolute().parent == config.out.absolute():
            raise FileError(f"{config.out} is no folder for tables; give --out a new folder")
        check_folder(config.out.absolute().parent, "the tables", "folder (--out)")
    with screen() as shown:
        shown.show(f"loading {config.loading.model}", "", plain=f"loading {config.loading.model}")
        target = options.load(config.loading, pack=False, adapters=False).target
        identity = fingerprint(target.tokenizer)
        folder = config.out or default_folder(tables.command, identity)
        check_free(folder, force=config.force)
        record = build_tables(
            tables,
            read_documents(target, answers=config.answers, text=config.text),
            folder,
            tokenizer=Tokenizer(base_name(target), identity, target.config.vocab_size),
            memory=given.get("memory"),
            made={
                "command": shown_command("anabranch", *sys.argv[1:]),
                "source": (config.answers or config.text or folder).name,
                "licence": config.licence,
            },
            report=lambda line: shown.show(line, "", plain=line),
        )
    size = sum(path.stat().st_size for path in folder.iterdir())
    if config.as_json:
        print(json.dumps({**record, "folder": str(folder), "bytes": size}))
        return
    facts = ", ".join(f"{value:,} {key}" for key, value in record["facts"].items() if isinstance(value, int))
    print(f"{tables.training.title} in {folder}: {facts}, {size:,} bytes")
    setting = method.name if config.out is None else f"{method.name}:data={config.out}"
    print(f"Next: anabranch chat --model {config.loading.model} --drafter {setting}")
