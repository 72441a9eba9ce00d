"""The card of an adapter folder: README.md for people, written from the record alone."""

from __future__ import annotations

import json
from typing import Any

from anabranch.adapters.record import method_of, title_of

__all__ = ["card"]


def card(record: dict[str, Any]) -> str:
    """Write a model card in Markdown: description, how to load, data and licences, recipe, measurements.

    Raises AdapterError for a record of an unknown method or with a malformed config.
    """
    target, training = record["target"], record["training"]
    method, trained = method_of(record)
    title, lora = title_of(target), target.get("lora")
    merged = f", lora={json.dumps(lora)}" if lora else ""
    lines = ["---", "library_name: anabranch", f"base_model: {json.dumps(target['name'])}"]
    if training.get("licence"):
        lines.append(f"license: {json.dumps(training['licence'])}")
    lines += [
        "---",
        "",
        f"# {trained.training.title} for {title}",
        "",
        f"An adapter with which anabranch decodes {title} faster by {trained.training.title}: more tokens a forward "
        "pass, and the same ones as without drafts.",
        "",
        f"- method: {method.name}",
        f"- target: {title}, family {target['family']}, fingerprint `{target['fingerprint']}`",
        f"- {trained.describe(trained.config.from_dict(record['config']))}, {record['parameters']:,} parameters in "
        f"{record['dtype']}, drafts from {record['draft_vocabulary']:,} tokens",
        f"- SHA-256 of adapter.safetensors ({record['bytes']:,} bytes): `{record['sha256']}`",
        "",
        "## Load",
        "",
        "```python",
        "import anabranch",
        "",
        f'model = anabranch.load({json.dumps(target["name"])}{merged}, drafter="{method.name}", adapter="this folder")',
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
    lines += ["```json", json.dumps({"config": record["config"], **rest}, indent=2), "```", "", "## Measured", ""]
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
        name = key or "unnamed"  # a source of data without a name
        if isinstance(value, dict):
            lines += _rows(f"{prefix}{name}: ", value)
        else:
            shown = " ".join(str(part) for part in value) if isinstance(value, list) else value
            lines.append(f"| {prefix}{name} | {shown} |")
    return lines
