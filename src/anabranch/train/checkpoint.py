"""Training state on disk: one safetensors file and one JSON file, written atomically.

RUN/checkpoint.safetensors    weights, AdamW moments and, as metadata, the record
RUN/checkpoint.json           the record again, readable: step, options, config, digest of the data
RUN/log.jsonl                 a line of progress every few steps; beside it log.csv and tensorboard/, if asked for
RUN/.lock                     held by the process that trains there
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anabranch.errors import FileError
from anabranch.model.stored import UNREADABLE, is_finite
from anabranch.support import locks
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import is_whole, parse_json

__all__ = [
    "Best",
    "alone",
    "drop_run",
    "load_checkpoint",
    "load_weights",
    "read_checkpoint",
    "read_log",
    "save_checkpoint",
    "trim_log",
]

WEIGHTS, RECORD, LOG, CSV, TENSORBOARD = (
    *("checkpoint.safetensors", "checkpoint.json"),
    *("log.jsonl", "log.csv", "tensorboard"),
)
STAGED = ".checkpoint.*.tmp"
BEST = "best."  # prefix of the weights of the best evaluation, where a run keeps them


def alone(folder: Path) -> AbstractContextManager[None]:
    """Keep other trainings out of a run's folder. Raises FileError if one is in it, or if it cannot be written."""
    return locks.alone(
        folder / ".lock",
        busy=f"another process trains in {folder}; wait for it or stop it, or give --out another folder",
        failed=f"the training cannot be written to {folder}",
        advice="choose another --out",
    )


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    record: dict[str, Any],
    best: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Store everything for an exact resume. The record is in the file of the tensors, so the two always agree.

    best  the weights of the best evaluation, if the run keeps them

    Raises FileError if the disk is full; the last checkpoint is kept.
    """
    tensors = {f"weight.{name}": value.detach().contiguous() for name, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value).detach().clone().contiguous()
    tensors.update((BEST + name, value) for name, value in (best or {}).items())
    staged = folder / STAGED.replace("*", str(os.getpid()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, staged, metadata={"record": json.dumps(record)})
            os.replace(staged, folder / WEIGHTS)
        finally:
            staged.unlink(missing_ok=True)
        write_atomically(folder / RECORD, json.dumps(record, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        kept = "; the last one is kept" if (folder / WEIGHTS).is_file() else ""
        raise FileError(
            f"the checkpoint of step {record['step']} cannot be written to {folder} ({error}){kept}; free some space "
            "there, and the same command resumes"
        ) from error


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The record of a run's checkpoint, or None without a checkpoint. Raises FileError for a damaged one."""
    path = folder / WEIGHTS
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as opened:
            record = parse_json((opened.metadata() or {})["record"])
        if not is_whole(record["step"], 0):
            raise TypeError("step")
    except UNREADABLE as error:
        raise FileError(f"the checkpoint in {folder} is damaged; delete the folder to start over") from error
    return dict(record)


def load_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore a run; returns its record, or None without a checkpoint. Raises FileError for a damaged one."""
    record = read_checkpoint(folder)
    if record is None:
        return None
    try:
        tensors = load_file(folder / WEIGHTS)
        module.load_state_dict(
            {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
        )
        state = optimizer.state_dict()
        state["state"] = _optimizer_state(tensors, optimizer)
        if not all(is_finite(value) for value in tensors.values()):
            raise ValueError("values that are not finite numbers")
        optimizer.load_state_dict(state)
    except UNREADABLE as error:
        raise FileError(
            f"the checkpoint in {folder} is damaged or belongs to other options; delete the folder to start over"
        ) from error
    return record


def load_weights(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names have a prefix, without it."""
    with safe_open(folder / WEIGHTS, "pt") as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
        return {name.removeprefix(prefix): opened.get_tensor(name) for name in names}


def _optimizer_state(tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """State for ``optimizer.load_state_dict``. Raises ValueError if it does not fit the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    restored: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if not name.startswith("optimizer."):
            continue
        _, index, key = name.split(".")
        if value.shape not in (torch.Size(()), parameters[int(index)].shape) or not value.is_floating_point():
            raise ValueError(f"{name} has the shape {tuple(value.shape)}")
        restored.setdefault(int(index), {})[key] = value
    if len({frozenset(state) for state in restored.values()}) > 1:
        raise ValueError("some parameters lack a part of their state")
    return restored


def drop_run(folder: Path) -> None:
    """Delete a run, so that a new one can start in its folder."""
    for path in (*(folder / name for name in (WEIGHTS, RECORD, LOG, CSV)), *folder.glob(STAGED)):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)


def trim_log(folder: Path, step: int) -> None:
    """Remove incomplete lines and those after ``step``: a killed run goes back to its checkpoint.

    What a run that was killed while it wrote a checkpoint left behind is removed too.
    """
    for left in folder.glob(STAGED):
        left.unlink(missing_ok=True)
    path = folder / LOG
    if path.is_file():
        kept = [json.dumps(line) + "\n" for line in read_log(folder) if line["step"] <= step]
        write_atomically(path, "".join(kept))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's log, each with ``step``, ``loss`` and ``evaluation``."""
    path = folder / LOG
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text)
            int(line["step"]), float(line["loss"]), line["evaluation"]
        except (ValueError, KeyError, TypeError):
            continue
        lines.append(line)
    return lines


@dataclass
class Best:
    """The best evaluation of a run that stops after ``patience`` evaluations without gain; 0: it never stops.

    step     the updates before that evaluation
    length   its predicted mean acceptance length ("tree")
    waited   evaluations since then
    seen     the updates before the last evaluation
    weights  the module's state then; empty without patience
    """

    patience: int
    step: int = 0
    length: float = 0.0
    waited: int = 0
    seen: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def exhausted(self) -> bool:
        """True if the run is to stop."""
        return 0 < self.patience <= self.waited

    def see(self, step: int, evaluation: Mapping[str, Any], module: nn.Module) -> None:
        """Count an evaluation, and keep the weights if it is the best."""
        if not self.patience:
            return
        self.seen = step
        if self.weights and evaluation["tree"] <= self.length:
            self.waited += 1
            return
        self.step, self.length, self.waited = step, float(evaluation["tree"]), 0
        self.weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    def put_back(self, module: nn.Module) -> None:
        """Give ``module`` the best weights, if there are any."""
        if self.weights:
            module.load_state_dict(self.weights)

    def record(self) -> dict[str, Any]:
        """Everything but the weights, for a checkpoint."""
        return {"step": self.step, "length": self.length, "waited": self.waited, "seen": self.seen}

    @staticmethod
    def restored(patience: int, record: Mapping[str, Any] | None, weights: dict[str, Tensor]) -> Best:
        """From a checkpoint; without weights there, or without patience, nothing was evaluated yet."""
        if not (patience and record and weights):
            return Best(patience)
        whole = {name: int(record[name]) for name in ("step", "waited", "seen")}
        return Best(patience, length=float(record["length"]), weights=weights, **whole)
