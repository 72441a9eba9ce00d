"""The training loop of stream adapters: schedule, evaluation, checkpoints, and a line of progress a step."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from anabranch.errors import FileError, InputError
from anabranch.model.decoder import Decoder
from anabranch.streams.adapter import StreamAdapter
from anabranch.streams.draft import DraftOptions, StreamDraft
from anabranch.train.checkpoint import load_checkpoint, save_checkpoint
from anabranch.train.data import Batch, Example, batches
from anabranch.train.objective import Frozen, LossOptions, StreamObjective
from anabranch.train.replay import replay

__all__ = ["Progress", "TrainOptions", "Trainer"]


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast. ``batch_tokens`` are padded text tokens a step; ``lr`` the peak learning rate.

    keep_states  run the frozen target over each batch once and keep what the streams need of it in memory: later
                 epochs cost half. Batches then have the same members in every epoch, in another order
    """

    epochs: float = 3.0
    batch_tokens: int = 2048
    lr: float = 1e-3
    warmup: int = 50
    schedule: Literal["cosine", "linear"] = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    segment: int = 128
    keep_states: bool = False
    seed: int = 0
    evaluate_every: int = 200
    evaluate_rows: int = 48
    checkpoint_every: int = 100
    loss: LossOptions = field(default_factory=LossOptions)

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise InputError(f"epochs must be positive, not {self.epochs}")
        if not self.lr > 0:
            raise InputError(f"lr must be positive, not {self.lr}")
        for name in ("batch_tokens", "segment", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.schedule not in ("cosine", "linear"):
            raise InputError(f"schedule must be cosine or linear, not {self.schedule!r}")


@dataclass(frozen=True)
class Progress:
    """What one step reports: mean loss a prediction, right predictions by stream, positions/s, seconds left."""

    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    positions_per_second: float
    seconds_left: float
    evaluation: dict[str, Any] | None = None


class Trainer:
    """Trains ``adapter`` for a frozen ``target`` on ``examples``; ``folder`` receives checkpoints and log.jsonl."""

    def __init__(
        self,
        target: Decoder,
        adapter: StreamAdapter,
        examples: list[Example],
        held_out: list[Example],
        options: TrainOptions,
        folder: Path,
    ) -> None:
        self.target, self.adapter, self.options, self.folder = target, adapter, options, folder
        self.examples, self.held_out = examples, held_out
        self.objective = StreamObjective(target, adapter, options.loss, segment=options.segment)
        self.optimizer = torch.optim.AdamW(
            adapter.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=options.weight_decay
        )
        self._groups = list(batches(examples, options.batch_tokens, seed=options.seed))
        self._kept: dict[int, Frozen] = {}
        self.per_epoch = len(self._groups)
        self.steps = max(1, math.ceil(self.per_epoch * options.epochs))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.options.warmup:
            return self.options.lr * (step + 1) / self.options.warmup
        done = (step - self.options.warmup) / max(1, self.steps - self.options.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.options.schedule == "cosine" else 1 - done
        return self.options.lr * max(fall, 0.02)

    def epoch(self, number: int) -> Iterator[tuple[Batch, Callable[[], Frozen]]]:
        """The batches of an epoch in its order, each with the way to its target states."""
        if not self.options.keep_states:
            for batch in batches(self.examples, self.options.batch_tokens, seed=self.options.seed + number):
                yield batch, partial(self.objective.freeze, batch)
            return
        order = list(range(self.per_epoch))
        random.Random(self.options.seed + number).shuffle(order)
        for index in order:
            yield self._groups[index], partial(self._remember, index)

    def _remember(self, index: int) -> Frozen:
        if index not in self._kept:
            self._kept[index] = self.objective.freeze(self._groups[index])
        return self._kept[index]

    def step(self, batch: Batch, frozen: Frozen, rate: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One update; returns the loss a prediction, right predictions and predictions by stream."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        gamma = self.adapter.config.num_streams
        right, count, loss = torch.zeros(gamma), torch.zeros(gamma), 0.0
        wanted = float((batch.lengths_B - 2 - batch.starts_B).clamp(min=0).sum()) * gamma
        reduced = self.target.dtype in (torch.bfloat16, torch.float16)
        for positions, real in self.objective.segments(batch):
            with torch.autocast(self.target.device.type, dtype=self.target.dtype, enabled=reduced):
                scores = self.objective.segment_loss(batch, frozen, positions, real)
            (scores.loss / wanted).backward()  # type: ignore[no-untyped-call]
            loss += float(scores.loss.detach())
            right += scores.right_S.cpu()
            count += scores.count_S.cpu()
        if not math.isfinite(loss):
            raise FileError(f"the loss is {loss}: lower --lr; the last checkpoint in {self.folder} is still good")
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss / max(1.0, float(count.sum())), right, count

    def evaluate(self, rows: int | None = None) -> dict[str, Any]:
        """Predicted mean acceptance length of held-out answers, with and without conditioning."""
        examples = self.held_out[: rows or len(self.held_out)]
        reduced = self.target.dtype in (torch.bfloat16, torch.float16)
        record: dict[str, Any] = {}
        settings = {"tree": DraftOptions(), "chain": DraftOptions(tree="chain")}
        if self.adapter.conditioner is not None:
            settings["tree without conditioning"] = DraftOptions(condition=False)
        with torch.autocast(self.target.device.type, dtype=self.target.dtype, enabled=reduced):
            for name, options in settings.items():
                found = replay(self.objective, StreamDraft(self.target, self.adapter, options), examples)
                record[name] = round(found.mean_acceptance_length, 4)
                if name == "tree":
                    gamma = self.adapter.config.num_streams
                    record["at least"] = [round(found.at_least(d), 4) for d in range(1, gamma + 1)]
                    record["by source"] = {
                        source: round(tokens / steps, 3) for source, (tokens, steps) in sorted(found.by_source.items())
                    }
        return record

    def run(self, report: Callable[[Progress], None], *, resume: bool = True) -> dict[str, Any]:
        """Train to the end (or go on from the last checkpoint) and return the final evaluation.

        Ctrl-C saves a checkpoint before it goes on up; an exact resume yields the same weights as no interruption.
        """
        record = load_checkpoint(self.folder, self.adapter, self.optimizer) if resume else None
        plan = json.loads(json.dumps(asdict(self.options)))
        if record is not None and record["options"] != plan:
            raise FileError(f"the run in {self.folder} was started with other options; use another --out, or those")
        done = 0 if record is None else int(record["step"])
        right, count = torch.zeros(self.adapter.config.num_streams), torch.zeros(self.adapter.config.num_streams)
        began, positions, step = time.monotonic(), 0, 0
        try:
            while step < self.steps:
                for batch, states in self.epoch(step // self.per_epoch):
                    step += 1
                    if step <= done:
                        continue
                    loss, r, c = self.step(batch, states(), self.rate(step - 1))
                    right, count = 0.95 * right + r, 0.95 * count + c
                    positions += int(c[0])
                    taken = time.monotonic() - began
                    evaluation = None
                    if step % self.options.evaluate_every == 0 and step < self.steps and self.held_out:
                        evaluation = self.evaluate(self.options.evaluate_rows)
                    accuracy = tuple((right / count.clamp(min=1)).tolist())
                    left = taken / (step - done) * (self.steps - step)
                    self._report(
                        report, Progress(step, self.steps, loss, accuracy, positions / taken, left, evaluation)
                    )
                    if step % self.options.checkpoint_every == 0:
                        self._save(step, plan)
                    if step >= self.steps:
                        break
        finally:
            if step > done:
                # a step that was interrupted half-way left the weights as they were
                self._save(min(step, self.steps), plan)
        return self.evaluate() if self.held_out else {}

    def _save(self, step: int, plan: dict[str, Any]) -> None:
        save_checkpoint(self.folder, self.adapter, self.optimizer, {"step": step, "options": plan})

    def _report(self, report: Callable[[Progress], None], progress: Progress) -> None:
        report(progress)
        if progress.step % 10 == 0 or progress.evaluation is not None:
            line = {**asdict(progress), "accuracy": [round(a, 4) for a in progress.accuracy]}
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}) + "\n")
