"""The training loop of stream adapters: schedule, evaluation, checkpoints, and a line of progress a step."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.interrupt import shielded
from anabranch.memory import off_heap
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import DraftOptions, StreamDraft
from anabranch.model.decoder import Decoder
from anabranch.train.checkpoint import drop_run, load_checkpoint, read_checkpoint, save_checkpoint, trim_log
from anabranch.train.data import Batch, Example, batches, digest
from anabranch.train.objective import Frozen, LossOptions, StreamObjective
from anabranch.train.replay import evaluate

__all__ = ["Progress", "TrainOptions", "Trainer"]

NAMED = 8  # rows of a broken batch that a message names
TREES = (4, 8)  # nodes of the trees that the last evaluation replays beside the one of 16
# options that may change when a run goes on: they do not touch the weights
_FREE = ("evaluate_every", "evaluate_rows", "checkpoint_every")
# what a run has beside its options, and why it may be another where all options are the same
_MADE = {"examples": "another file of --answers or --text", "initial weights": "another --init, or none"}


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast. ``batch_tokens`` are padded text tokens a step; ``lr`` the peak learning rate.

    keep_states  run the frozen target over each batch once and keep what the streams need of it, on a CPU in a
                 nameless file in the run's folder, on a GPU in its memory: later epochs cost half. Batches then have
                 the same members in every epoch, in another order
    evaluate_every  steps between evaluations; 0: six evaluations a run, but every 10 to 200 steps
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
    evaluate_every: int = 0
    evaluate_rows: int = 48
    checkpoint_every: int = 100
    loss: LossOptions = field(default_factory=LossOptions)

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise InputError(f"epochs must be positive, not {self.epochs}")
        if not self.lr > 0:
            raise InputError(f"lr must be positive, not {self.lr}")
        for name, low in (("batch_tokens", 1), ("segment", 1), ("evaluate_every", 0), ("checkpoint_every", 1)):
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.warmup < 0 or not self.clip > 0:
            raise InputError(f"warmup must be at least 0 and clip positive, not {self.warmup} and {self.clip}")
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
    """Trains ``adapter`` for a frozen ``target`` on ``examples``; ``folder`` receives checkpoints and log.jsonl.

    ``frozen`` is a copy of the target that passes without gradients run through (default: the target). ``plan`` holds
    settings that examples and vocabulary were made with, to be named where they are not those of the run in ``folder``.
    """

    def __init__(
        self,
        target: Decoder,
        adapter: StreamAdapter,
        examples: list[Example],
        held_out: list[Example],
        options: TrainOptions,
        folder: Path,
        *,
        frozen: Decoder | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        if not examples:
            raise InputError("there are no examples to train on; hold fewer out or give more answers")
        if adapter.config.context_top:
            raise CapabilityError("context_top is for decoding; train with context_top 0 and set it afterwards")
        self.target, self.adapter, self.options, self.folder = target, adapter, options, folder
        self.examples, self.held_out, self.plan = examples, held_out, dict(plan or {})
        self.objective = StreamObjective(target, adapter, options.loss, segment=options.segment, frozen=frozen)
        self.optimizer = torch.optim.AdamW(
            adapter.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=options.weight_decay
        )
        self._groups = list(batches(examples, options.batch_tokens, seed=options.seed))
        self._kept: dict[int, Frozen] = {}
        self.per_epoch = len(self._groups)
        self.steps = max(1, math.ceil(self.per_epoch * options.epochs))
        self.evaluate_every = options.evaluate_every or max(10, min(200, self.steps // 6))
        self.done = 0  # updates applied
        self._right = torch.zeros(adapter.config.num_streams)
        self._count = torch.zeros(adapter.config.num_streams)
        self._digest = digest(examples)
        self._began = _weights(adapter)

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
            frozen = self.objective.freeze(self._groups[index])
            keep = partial(off_heap, folder=self.folder)
            pairs = [(keep(keys), keep(values)) for keys, values in frozen.keys_values]
            self._kept[index] = Frozen(keep(frozen.entry_BTD), keep(frozen.hidden_BTD), pairs)
        return self._kept[index]

    def step(self, batch: Batch, frozen: Frozen, rate: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One update; returns the loss a prediction, right predictions and predictions by stream."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)  # here and not behind the update: an interrupted step left some
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
        norm = float(torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), self.options.clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FileError(self._diverged(batch, loss, norm))
        with shielded():  # a partly updated set of weights is no state to go on from
            self.optimizer.step()
            self.done += 1
        return loss / max(1.0, float(count.sum())), right, count

    def _diverged(self, batch: Batch, loss: float, norm: float) -> str:
        """What to say of a loss or gradient that is not finite."""
        names, more = ", ".join(batch.names[:NAMED]), len(batch.names) - NAMED
        rows = f"{names} and {more} more" if more > 0 else names
        kept = f"; the checkpoint of step {self.done} is kept in {self.folder}" if self.done else ""
        return (
            f"the loss is {loss} and the norm of its gradient {norm} at step {self.done + 1} of {self.steps}, in the "
            f"batch with the rows {rows}{kept}; start anew (--no-resume) with a lower learning rate (--lr), or "
            "without the rows that are broken"
        )

    def evaluate(self, rows: int | None = None, *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Held-out accuracy by stream and predicted mean acceptance length, with and without conditioning.

        The length of a tree of 16 nodes is called "tree", those of trees of ``nodes`` nodes "4 nodes", ....
        """
        gamma = self.adapter.config.num_streams
        settings = {"tree": DraftOptions(), "chain": DraftOptions(tree="chain")}
        settings |= {f"{n} nodes": DraftOptions(nodes=n) for n in nodes}
        if self.adapter.conditioner is not None:
            settings["tree without conditioning"] = DraftOptions(condition=False)
        drafts = {name: StreamDraft(self.target, self.adapter, options) for name, options in settings.items()}
        reduced = self.target.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self.target.device.type, dtype=self.target.dtype, enabled=reduced):
            found, accuracy = evaluate(self.objective, drafts, self.held_out[:rows])
        first, among = accuracy.shares()
        tree = found["tree"]
        return {
            **{name: round(total.mean_acceptance_length, 4) for name, total in found.items()},
            "top 1": [round(share, 4) for share in first],
            f"top {accuracy.top}": [round(share, 4) for share in among],
            "at least": [round(tree.at_least(d), 4) for d in range(1, gamma + 1)],
            "by source": {name: round(t / steps, 3) for name, (t, steps) in sorted(tree.by_source.items())},
        }

    def run(self, report: Callable[[Progress], None], *, resume: bool = True) -> dict[str, Any]:
        """Train to the end (or go on from the last checkpoint) and return the final evaluation.

        KeyboardInterrupt (Ctrl-C, and SIGTERM under ``sigterm_raises``) saves a checkpoint before it propagates; a
        resumed run yields the same weights as one that was not interrupted. Raises FileError where the folder holds a
        run with other options, streams or examples, and where the loss is not finite.
        """
        self._restore(resume)
        first, saved, positions, began = self.done, self.done, 0, time.monotonic()
        try:
            for batch, states in self._left(first):
                loss, right, count = self.step(batch, states(), self.rate(self.done))
                self._right, self._count = 0.95 * self._right + right, 0.95 * self._count + count
                positions += int(count[0])
                evaluation = None
                if self._evaluates():
                    evaluation = self.evaluate(self.options.evaluate_rows)
                taken = time.monotonic() - began
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
        """Whether the step that was just done is followed by an evaluation of the first held-out examples."""
        if not self.held_out or self.done < self.steps:
            return bool(self.held_out) and self.done % self.evaluate_every == 0
        return len(self.held_out) > self.options.evaluate_rows  # else the last evaluation is of the same examples

    def _left(self, done: int) -> Iterator[tuple[Batch, Callable[[], Frozen]]]:
        """The batches that are still to come after ``done`` steps."""
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
        load_checkpoint(self.folder, self.adapter, self.optimizer)
        self.done = int(found["step"])
        if "right" in found:
            self._right, self._count = torch.tensor(found["right"]), torch.tensor(found["count"])
        trim_log(self.folder, self.done)

    def _agree(self, found: Mapping[str, Any]) -> None:
        """Raise FileError where a stored run was started with what this one does not have, and name it."""
        identity = self._identity()
        other = [name for name in ("options", "streams") for name in _other(found.get(name), identity[name])]
        if made := [name for name in _MADE if found.get(name, identity[name]) != identity[name]]:
            other += _other(found.get("plan"), self.plan)
        if made and not other:
            other = [f"other {made[0]} ({_MADE[made[0]]})"]
        if other:
            raise FileError(
                f"the run in {self.folder} was started with {', '.join(other)}; use that, another folder, or start "
                "anew with --no-resume"
            )

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one that it goes on with."""
        return {
            "options": json.loads(json.dumps(asdict(self.options))),
            "streams": self.adapter.config.to_dict(),
            "examples": self._digest,
            "initial weights": self._began,
        }

    def _save(self) -> None:
        accuracy = {"right": self._right.tolist(), "count": self._count.tolist()}
        record = {"step": self.done, **self._identity(), "plan": self.plan, **accuracy}
        with shielded():  # a second signal waits until the checkpoint is written
            save_checkpoint(self.folder, self.adapter, self.optimizer, record)

    def _report(self, report: Callable[[Progress], None], progress: Progress) -> None:
        report(progress)
        if progress.step % 10 == 0 or progress.step == progress.steps or progress.evaluation is not None:
            line = {**asdict(progress), "accuracy": [round(a, 4) for a in progress.accuracy]}
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}) + "\n")


def _other(stored: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Each field that is not as it was, with both values: "epochs 3.0 (now 2.0)"."""
    before, now = _flat(stored or {}), _flat(wanted)
    # a run from before a field existed has nothing to compare it with
    changed = [name for name in before if name not in _FREE and before[name] != now.get(name)]
    return [f"{name} {before[name]} (now {now.get(name)})" for name in changed]


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with those of fields in their place."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _weights(adapter: StreamAdapter) -> str:
    """Identity of an adapter's weights and draft vocabulary: a SHA-256 in hex."""
    seen = hashlib.sha256()
    for name, value in sorted(adapter.state_dict().items()):
        seen.update(name.encode())
        seen.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
