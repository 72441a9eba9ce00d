"""Logs of a training run: log.jsonl always; CSV and TensorBoard beside it if asked for.

RUN/log.jsonl      a line every 10 steps, at each evaluation and at the last step; resuming reads it
RUN/log.csv        the same in columns, for spreadsheets
RUN/tensorboard/   the same as scalars, for ``tensorboard --logdir RUN``
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.train.checkpoint import CSV, LOG, TENSORBOARD, read_log

__all__ = ["KINDS", "Logs", "check_logs"]

KINDS = ("csv", "tensorboard")
Line = Mapping[str, Any]


class _Log(Protocol):
    """Receives the lines of log.jsonl."""

    def write(self, line: Line) -> None:
        """Add a line."""

    def close(self) -> None:
        """Write what is still in memory."""


def check_logs(kinds: Sequence[str]) -> None:
    """Check ``kinds`` of logs before a model is loaded. Raises InputError or CapabilityError."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"there is no log {unknown[0]!r}; give {' or '.join(KINDS)}")
    if "tensorboard" in kinds:
        _summary_writer()


def _summary_writer() -> Any:
    """TensorBoard's writer. Raises CapabilityError without the package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CapabilityError(
            "TensorBoard logs need the package tensorboard; install it with pip install 'anabranch[tensorboard]', or "
            "use --log csv"
        ) from error
    return SummaryWriter


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a log line by name: loss, accuracy by predictor, speed, and held-out lengths where evaluated."""
    numbers = {"loss": line["loss"], "positions_per_second": line["positions_per_second"]}
    numbers |= {f"accuracy_{n}": share for n, share in enumerate(line["accuracy"], 1)}
    evaluation = line["evaluation"] or {}
    return numbers | {f"held_out_{name}": value for name, value in evaluation.items() if isinstance(value, float)}


class _CsvLog:
    """Rows of the numbers of all log lines; columns that a line lacks are empty."""

    def __init__(self, folder: Path, predictors: int) -> None:
        accuracies = [f"accuracy_{n}" for n in range(1, predictors + 1)]
        self.columns = ["step", "loss", *accuracies, "positions_per_second", "held_out_tree"]
        self.path = folder / CSV
        with self.path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(self.columns)
        for line in read_log(folder):  # those of a run that is resumed
            self.write(line)

    def write(self, line: Line) -> None:
        """Append a row."""
        values = {"step": line["step"], **scalars(line)}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow([values.get(column, "") for column in self.columns])

    def close(self) -> None:
        """Nothing is in memory."""


class _TensorBoardLog:
    """Scalars by step; those after the step at which a run is resumed are hidden."""

    def __init__(self, folder: Path, done: int) -> None:
        self.writer = _summary_writer()(str(folder / TENSORBOARD), purge_step=done + 1 if done else None)

    def write(self, line: Line) -> None:
        """Add the line's numbers."""
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what is still in memory."""
        self.writer.close()


class Logs:
    """All logs of a run in ``folder``, from step ``done`` on."""

    def __init__(self, folder: Path, kinds: Sequence[str], predictors: int, done: int) -> None:
        check_logs(kinds)
        self.folder, self.others = folder, list[_Log]()
        with self._writable():
            folder.mkdir(parents=True, exist_ok=True)
            if "csv" in kinds:
                self.others.append(_CsvLog(folder, predictors))
            if "tensorboard" in kinds:
                self.others.append(_TensorBoardLog(folder, done))

    def write(self, line: Line) -> None:
        """Add a line to all logs. Raises FileError."""
        with self._writable():
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            for log in self.others:
                log.write(line)

    def close(self) -> None:
        """Write what is still in memory. Raises FileError."""
        with self._writable():
            for log in self.others:
                log.close()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FileError(
                f"the log cannot be written to {self.folder} ({error.strerror or error}); free some space there"
            ) from error
