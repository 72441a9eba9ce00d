"""Advice for folders given in the wrong place: PEFT adapters, and our adapters given as models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["peft_advice", "why_no_model"]

CONFIG = "adapter_config.json"  # the name is PEFT's and ours


def peft_advice(folder: Path | str, record: Any) -> str | None:
    """Advice on a PEFT folder, given the contents of its adapter_config.json; None if it is not one."""
    if not isinstance(record, Mapping) or "peft_type" not in record:
        return None
    base = record.get("base_model_name_or_path")
    into = f"its base model {base}" if isinstance(base, str) and base else "its base model"
    what = f"{folder} is a PEFT {record['peft_type']} folder, neither a model nor an anabranch adapter"
    if record["peft_type"] == "LORA":
        return f"{what}; load {into} and give the folder as the LoRA (lora=FOLDER, or --lora FOLDER)"
    return (
        f"{what}; merge it into {into} with peft's merge_and_unload, save the result with save_pretrained, and load "
        "that folder"
    )


def why_no_model(folder: Path, name: str) -> str | None:
    """The reason why a folder without config.json is not a model, if known; ``name`` is the user's name for it."""
    try:
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if sentence := peft_advice(name, record):
        return sentence
    if not isinstance(record, Mapping) or not str(record.get("format", "")).startswith("anabranch"):
        return None
    target = record["target"].get("name") if isinstance(record.get("target"), Mapping) else None
    return (
        f"{name} is an adapter, not a model; give it as the adapter, and the model that it was trained for"
        f"{f' ({target})' if target else ''} as the model"
    )
