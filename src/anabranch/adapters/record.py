"""The record of an adapter folder (adapter_config.json), read and checked, and the card written from it.

It names the adapter's method and holds the config of the method's module:

    {"format": "anabranch adapter", "version": 2, "method": NAME, "config": {...}, "target": {...}, "sha256": ..., ...}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.errors import AdapterError
from anabranch.methods import Method, methods
from anabranch.support.foreign import peft_advice
from anabranch.support.jsonfiles import read_json, shown

__all__ = ["CONFIG", "FORMAT", "VERSION", "card", "method_of", "predicted_lengths", "read_record", "title_of"]

FORMAT, VERSION = "anabranch adapter", 2
CONFIG = "adapter_config.json"
# required fields
_FIELDS = {"method": str, "target": dict, "config": dict, "sha256": str, "training": dict, "measured": dict}


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of an adapter folder.

    Raises AdapterError if the folder or its config is missing, malformed, or of another format version.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise AdapterError(f"there is no adapter folder {folder}; give a folder with {CONFIG} and adapter.safetensors")
    if not path.is_file():
        raise AdapterError(f"the folder {folder} has no {CONFIG}; it is no adapter, or its copy is incomplete")
    record = read_json(path, "copy or train the adapter again", error=AdapterError)
    if sentence := peft_advice(folder, record):
        raise AdapterError(sentence)
    if record.get("format") != FORMAT:
        raise AdapterError(f"{path} does not describe an adapter of anabranch; give a folder that 'train' wrote")
    version = record.get("version")
    if version != VERSION or isinstance(version, bool):
        raise AdapterError(
            f"{path} has the format version {shown(version)}, and this anabranch reads {VERSION}; update anabranch or "
            "train the adapter again"
        )
    for field, kind in _FIELDS.items():
        if not isinstance(record.get(field), kind):
            raise AdapterError(f"{path} lacks {field!r} or has it malformed; copy or train the adapter again")
    named = [record["target"].get(key) for key in ("name", "fingerprint")]
    if not all(isinstance(text, str) and text.isprintable() and len(text) < 500 for text in named):
        raise AdapterError(f"{path} does not say which target it belongs to; copy or train the adapter again")
    return record


def title_of(target: dict[str, Any]) -> str:
    """The name of an adapter's target in its record, with the LoRA merged into it, if any."""
    lora = target.get("lora")
    return f"{target['name']} with the LoRA {shown(lora)}" if lora else str(target["name"])


def predicted_lengths(record: dict[str, Any]) -> dict[int, float]:
    """The predicted mean acceptance lengths by nodes of best-first trees, from training; empty if none is recorded."""
    measured = record.get("measured", {}).get("predicted mean acceptance length")
    if not isinstance(measured, dict):
        return {}
    named = {"tree": 16} | {f"{nodes} nodes": nodes for nodes in (2, 4, 8, 16, 32, 64)}
    lengths = {nodes: measured[name] for name, nodes in named.items() if isinstance(measured.get(name), int | float)}
    return {nodes: float(length) for nodes, length in sorted(lengths.items()) if 1 < length < 100}


def method_of(record: dict[str, Any]) -> tuple[Method, Trained]:
    """The method of a record, and its trained part. Raises AdapterError for an unknown method."""
    known = {method.name: (method, method.trained) for method in methods() if method.trained is not None}
    if record["method"] not in known:
        raise AdapterError(
            f"the adapter is for the method {shown(record['method'])}, which is not known here; methods with adapters "
            f"are {', '.join(known)}; update anabranch, or register the method first"
        )
    return known[record["method"]]


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
