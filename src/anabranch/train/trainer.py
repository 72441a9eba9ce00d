"""The training loop of all methods: schedule, evaluation, checkpoints and progress."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anabranch.errors import FileError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import TrainOptions
from anabranch.methods.trained import Trainable
from anabranch.model.decoder import Decoder
from anabranch.support.interrupt import shielded
from anabranch.support.memory import off_heap
from anabranch.train.checkpoint import drop_run, load_checkpoint, read_checkpoint, save_checkpoint, trim_log
from anabranch.train.data import batches, digest

__all__ = ["TREES", "Progress", "Trainer"]

NAMED = 8  # maximum number of rows of a broken batch in a message
TREES = (4, 8)  # nodes of additional trees in the final evaluation
# options that may change when a run is resumed: they do not affect the weights
_FREE = ("evaluate_every", "evaluate_rows", "checkpoint_every")
# what identifies a run besides its options, and why it may differ although all options are equal
_MADE = {"examples": "another file of --answers or --text", "initial weights": "another --init, or none"}


@dataclass(frozen=True)
class Progress:
    """Progress after a step: mean loss per prediction, accuracy by predictor, positions/s, estimated seconds left."""

    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    positions_per_second: float
    seconds_left: float
    evaluation: dict[str, Any] | None = None


class Trainer:
    """Trains ``module`` for a frozen ``target`` on ``examples``; ``folder`` receives checkpoints and log.jsonl.

    objective  the training objective of the module
    plan       settings that determine examples, vocabulary and module, for messages about a different run in ``folder``
    """

    def __init__(
        self,
        target: Decoder,
        module: Trainable,
        objective: Objective[Any],
        examples: list[Example],
        held_out: list[Example],
        options: TrainOptions,
        folder: Path,
        *,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        if not examples:
            raise InputError("there are no examples to train on; hold fewer out or give more completions")
        self.target, self.module, self.objective = target, module, objective
        self.options, self.folder = options, folder
        self.examples, self.held_out, self.plan = examples, held_out, dict(plan or {})
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=options.weight_decay
        )
        self._groups = list(batches(examples, options.batch_tokens, seed=options.seed))
        self._kept: dict[int, Any] = {}
        self.per_epoch = len(self._groups)
        self.steps = max(1, math.ceil(self.per_epoch * options.epochs))
        self.evaluate_every = options.evaluate_every or max(10, min(200, self.steps // 6))
        self.done = 0  # updates applied
        self.seconds = 0.0  # that they took, evaluations in between included, over all runs from the same checkpoints
        self._right = torch.zeros(objective.predictors)
        self._count = torch.zeros(objective.predictors)
        self._digest = digest(examples)
        self._began = _weights(module)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.options.warmup:
            return self.options.lr * (step + 1) / self.options.warmup
        done = (step - self.options.warmup) / max(1, self.steps - self.options.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.options.schedule == "cosine" else 1 - done
        return self.options.lr * max(fall, 0.02)

    def epoch(self, number: int) -> Iterator[tuple[Batch, Callable[[], Any]]]:
        """The batches of an epoch in order, each with a function that returns the target's states for it."""
        if not self.options.keep_states:
            for batch in batches(self.examples, self.options.batch_tokens, seed=self.options.seed + number):
                yield batch, partial(self.objective.freeze, batch)
            return
        order = list(range(self.per_epoch))
        random.Random(self.options.seed + number).shuffle(order)
        for index in order:
            yield self._groups[index], partial(self._remember, index)

    def _remember(self, index: int) -> Any:
        if index not in self._kept:
            frozen = self.objective.freeze(self._groups[index])
            self._kept[index] = self.objective.keep(frozen, partial(off_heap, folder=self.folder))
        return self._kept[index]

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = self.target.dtype
        reduced = dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.target.device.type, dtype=dtype, enabled=reduced)

    def step(self, batch: Batch, frozen: Any, rate: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One update; returns the loss per prediction, right predictions and predictions by predictor."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)  # before the step, since an interrupted one leaves gradients
        right, count, loss = torch.zeros_like(self._right), torch.zeros_like(self._count), 0.0
        wanted = self.objective.predictions(batch)
        for segment in self.objective.segments(batch):
            with self._autocast():
                scores = self.objective.loss(batch, frozen, segment)
            (scores.loss / wanted).backward()  # type: ignore[no-untyped-call]
            loss += float(scores.loss.detach())
            right += scores.right_S.cpu()
            count += scores.count_S.cpu()
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.options.clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FileError(self._diverged(batch, loss, norm))
        with shielded():  # a run cannot resume from partly updated weights
            self.optimizer.step()
            self.done += 1
        return loss / max(1.0, float(count.sum())), right, count

    def _diverged(self, batch: Batch, loss: float, norm: float) -> str:
        """The message for a loss or gradient that is not finite."""
        names, more = ", ".join(batch.names[:NAMED]), len(batch.names) - NAMED
        rows = f"{names} and {more} more" if more > 0 else names
        kept = f"; the checkpoint of step {self.done} is kept in {self.folder}" if self.done else ""
        return (
            f"the loss is {loss} and the norm of its gradient {norm} at step {self.done + 1} of {self.steps}, in the "
            f"batch with the rows {rows}{kept}; start over (--no-resume) with a lower learning rate (--lr), or "
            "remove the broken rows"
        )

    def evaluate(self, rows: int | None = None, *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """``Objective.evaluate`` on the first ``rows`` held-out examples (default: all)."""
        return self.evaluate_on(self.held_out[:rows], nodes=nodes)

    def evaluate_on(self, examples: Sequence[Example], *, nodes: Sequence[int] = TREES) -> dict[str, Any]:
        """``Objective.evaluate`` on any examples."""
        with self._autocast():
            return self.objective.evaluate(examples, nodes=nodes)

    def run(self, report: Callable[[Progress], None], *, resume: bool = True) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one, and return the final evaluation.

        On KeyboardInterrupt (Ctrl-C, and SIGTERM under ``sigterm_raises``) a checkpoint is saved first; a resumed run
        yields the same weights as an uninterrupted one. Raises FileError if the folder contains a run with other
        options, another config or other examples, or if the loss is not finite.
        """
        self._restore(resume)
        first, saved, positions, began = self.done, self.done, 0, time.monotonic()
        before = self.seconds
        try:
            for batch, states in self._left(first):
                loss, right, count = self.step(batch, states(), self.rate(self.done))
                self._right, self._count = 0.95 * self._right + right, 0.95 * self._count + count
                positions += int(count[0])
                evaluation = None
                if self._evaluates():
                    evaluation = self.evaluate(self.options.evaluate_rows)
                taken = time.monotonic() - began
                self.seconds = before + taken
                accuracy = tuple((self._right / self._count.clamp(min=1)).tolist())
                left = taken / (self.done - first) * (self.steps - self.done)
                speed = positions / max(taken, 1e-9)
                self._report(report, Progress(self.done, self.steps, loss, accuracy, speed, left, evaluation))
                if self.done % self.options.checkpoint_every == 0:
                    self._save()
                    saved = self.done
        finally:
            if self.done > saved:
                self._save()
        return self.evaluate(nodes=TREES) if self.held_out else {}

    def _evaluates(self) -> bool:
        """Whether an evaluation on the first held-out examples follows the last step."""
        if not self.held_out or self.done < self.steps:
            return bool(self.held_out) and self.done % self.evaluate_every == 0
        return len(self.held_out) > self.options.evaluate_rows  # otherwise the final evaluation has the same examples

    def _left(self, done: int) -> Iterator[tuple[Batch, Callable[[], Any]]]:
        """The batches that remain after ``done`` steps."""
        for number in itertools.count(done // self.per_epoch):
            for index, item in enumerate(self.epoch(number), number * self.per_epoch):
                if index >= self.steps:
                    return
                if index >= done:
                    yield item

    def _restore(self, resume: bool) -> None:
        if not resume:
            drop_run(self.folder)
        found = read_checkpoint(self.folder)
        if found is None:
            drop_run(self.folder)
            return
        self._agree(found)
        load_checkpoint(self.folder, self.module, self.optimizer)
        self.done, self.seconds = int(found["step"]), float(found.get("seconds", 0.0))
        if "right" in found:
            self._right, self._count = torch.tensor(found["right"]), torch.tensor(found["count"])
        trim_log(self.folder, self.done)

    def _agree(self, found: Mapping[str, Any]) -> None:
        """Raise FileError, naming the differences, if a stored run was started differently."""
        identity = self._identity()
        other = [name for part in ("config", "options", "loss") for name in _other(found.get(part), identity[part])]
        if made := [name for name in _MADE if found.get(name, identity[name]) != identity[name]]:
            other += _other(found.get("plan"), self.plan)
        if made and not other:
            other = [f"other {made[0]} ({_MADE[made[0]]})"]
        if other:
            raise FileError(
                f"the run in {self.folder} was started with {', '.join(other)}; use that, another folder, or start "
                "over with --no-resume"
            )

    def _identity(self) -> dict[str, Any]:
        """What must be equal to resume a run."""
        parts = {
            "config": self.module.config.to_dict(),
            "options": asdict(self.options),
            "loss": asdict(self.objective.options),
        }
        return {**json.loads(json.dumps(parts)), "examples": self._digest, "initial weights": self._began}

    def _save(self) -> None:
        accuracy = {"right": self._right.tolist(), "count": self._count.tolist()}
        made = {"step": self.done, "seconds": round(self.seconds, 1)}
        record = {**made, **self._identity(), "plan": self.plan, **accuracy}
        with shielded():  # a second signal waits until the checkpoint is written
            save_checkpoint(self.folder, self.module, self.optimizer, record)

    def _report(self, report: Callable[[Progress], None], progress: Progress) -> None:
        report(progress)
        if progress.step % 10 == 0 or progress.step == progress.steps or progress.evaluation is not None:
            line = {**asdict(progress), "accuracy": [round(a, 4) for a in progress.accuracy]}
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}) + "\n")


def _other(stored: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Each field that differs, with both values: "epochs 3.0 (now 2.0)"."""
    before: Mapping[str, Any] = stored if isinstance(stored, Mapping) else {}
    changed = [name for name in before if name not in _FREE and before[name] != wanted.get(name)]
    return [f"{name} {before[name]} (now {wanted.get(name)})" for name in changed]


def _weights(module: Trainable) -> str:
    """The identity of a module's weights and draft vocabulary: a SHA-256 in hex."""
    seen = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        seen.update(name.encode())
        seen.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
