"""Training state on disk: one safetensors file and one JSON file, written beside and moved into place.

    RUN/checkpoint.safetensors    adapter weights and AdamW moments
    RUN/checkpoint.json           step, epoch, batches done, options
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from anabranch.errors import FileError
from anabranch.files import write_atomically

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Store everything that an exact resume needs. The tensors carry the step, so a torn pair is noticed."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"weight.{name}": value.detach().contiguous() for name, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value).detach().clone().contiguous()
    staged = folder / f".checkpoint.{os.getpid()}.tmp"
    try:
        save_file(tensors, staged, metadata={"record": json.dumps(record)})
        os.replace(staged, folder / "checkpoint.safetensors")
    finally:
        staged.unlink(missing_ok=True)
    write_atomically(folder / "checkpoint.json", json.dumps(record, indent=2) + "\n")


def load_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore a run; returns its record, or None where there is none. Raises FileError for a damaged one."""
    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        return None
    try:
        tensors = load_file(path)
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            record: dict[str, Any] = json.loads((opened.metadata() or {})["record"])
        module.load_state_dict(
            {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
        )
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise FileError(
            f"the checkpoint in {folder} is damaged or belongs to other options; delete the folder to start anew"
        ) from error
    state = optimizer.state_dict()
    restored: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            restored.setdefault(int(index), {})[key] = value
    state["state"] = restored
    optimizer.load_state_dict(state)
    return record
