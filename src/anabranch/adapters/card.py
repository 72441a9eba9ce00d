"""The card of an adapter folder: README.md for people, written from the record and from nothing else."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["card"]


def card(record: dict[str, Any]) -> str:
    """Markdown with a model card's front matter: what it is, data and licences, recipe, measurements, how to load."""
    target, streams, training = record["target"], record["streams"], record["training"]
    lines = ["---", "library_name: anabranch", f"base_model: {json.dumps(target['name'])}"]
    if training.get("licence"):
        lines.append(f"license: {json.dumps(training['licence'])}")
    lines += [
        "---",
        "",
        f"# Stream adapter for {target['name']}",
        "",
        f"Lets anabranch decode {target['name']} faster by Speculative Streaming. The target stays as it is, and so "
        "does what it says: an adapter changes how many tokens a forward pass yields, never which.",
        "",
        f"- target: {target['name']}, family {target['family']}, fingerprint `{target['fingerprint']}`",
        f"- {streams['num_streams']} streams through the top {streams['num_stream_layers']} layers, "
        f"{record['parameters']:,} parameters in {record['dtype']}, drafts from {record['draft_vocabulary']:,} tokens",
        f"- SHA-256 of adapter.safetensors ({record['bytes']:,} bytes): `{record['sha256']}`",
        "",
        "## Load",
        "",
        "```python",
        "import anabranch",
        "",
        f'model = anabranch.load({json.dumps(target["name"])}, drafter="streams", adapter="this folder")',
        "```",
        "",
        "## Data",
        "",
        *_data(training),
        "",
        "## Recipe",
        "",
    ]
    if training.get("command"):
        lines += ["```console", str(training["command"]), "```", ""]
    rest = {name: value for name, value in training.items() if name not in ("command", "data", "licence")}
    lines += ["```json", json.dumps({"streams": streams, **rest}, indent=2), "```", "", "## Measured", ""]
    lines += _measured(record["measured"])
    return "\n".join(lines) + "\n"


def _data(training: dict[str, Any]) -> list[str]:
    data = training.get("data") or []
    if not data:
        return ["Not stated."]
    lines = ["| prompts from | examples | licence |", "|---|---:|---|"]
    for part in data:
        licence = part.get("licence") or "not stated"
        lines.append(f"| {part.get('source') or 'unnamed'} | {part.get('examples', 0):,} | {licence} |")
    return lines


def _measured(measured: dict[str, Any]) -> list[str]:
    if not measured:
        return ["Not measured."]
    return ["| what | value |", "|---|---|", *_rows("", measured)]


def _rows(prefix: str, measured: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in measured.items():
        name = key or "unnamed"  # a source, as in the table of the data
        if isinstance(value, dict):
            lines += _rows(f"{prefix}{name}: ", value)
        else:
            shown = " ".join(str(part) for part in value) if isinstance(value, list) else value
            lines.append(f"| {prefix}{name} | {shown} |")
    return lines
