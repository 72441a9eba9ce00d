"""Write a GGUF file as a Hugging Face folder, for tools that read nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from anabranch.model.gguf import GGUFContents

__all__ = ["write_folder", "write_json"]


def write_folder(
    contents: GGUFContents, folder: Path, report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write dequantised safetensors in the dtype that ``contents`` was read in, config and tokenizer to a new folder.

    report  called with tensors done and their number
    """
    folder.mkdir()
    tensors = {}
    for done, name in enumerate(contents.tensors, start=1):
        tensors[name] = contents.tensors[name].contiguous()
        report(done, len(contents.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates private files, but a cache may be shared
    contents.tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", contents.config)
    ends = {key: contents.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ends)


def write_json(path: Path, record: object) -> None:
    """Write a record with an indentation of two spaces."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
