"""The training loop of all methods: schedule, evaluation, checkpoints and progress."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anabranch.drafting.trained import Trainable
from anabranch.errors import FileError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import TrainOptions
from anabranch.learning.recompute import recomputing
from anabranch.model.decoder import Decoder
from anabranch.support.interrupt import shielded
from anabranch.support.log import LOGGER
from anabranch.train.checkpoint import (
    BEST,
    Best,
    alone,
    drop_run,
    load_checkpoint,
    load_weights,
    read_checkpoint,
    save_checkpoint,
    trim_log,
)
from anabranch.train.data import batches, digest
from anabranch.train.logs import Logs
from anabranch.train.processes import Processes, Share, shares
from anabranch.train.states import KeptStates

__all__ = ["TREES", "Progress", "Trainer"]

NAMED = 8  # maximum number of rows of a broken batch in a message
TREES = (4, 8)  # nodes of additional trees in the final evaluation
# options that may change when a run is resumed: they do not affect the weights of a step, or by rounding only
_FREE = ("evaluate_every", "evaluate_rows", "checkpoint_every", "patience", "accumulate", "recompute", "keep_states")
_COMPUTED = ("target", "quantize")  # in ``plan``: what the target's states depend on, besides their type
_WHOSE = ("method", "target")  # in ``plan``: a run of another one is never continued
Part = tuple[Share, Callable[[], Any]]  # a share of a step's batch, and what returns the target's states for it
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
    """Trains ``module`` for a frozen ``target`` on ``examples``; ``folder`` receives checkpoints and logs.

    objective  the training objective of the module
    logs       kinds of logs besides log.jsonl: csv, tensorboard
    processes  those that share the training; the first one evaluates and writes, and all end with the same weights
    states     a folder for the file of kept states, which other trainings on the same examples share; None: ``folder``
    say        receives a line with the size of the file of kept states
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
        logs: Sequence[str] = (),
        processes: Processes | None = None,
        states: Path | None = None,
        say: Callable[[str], None] = LOGGER.info,
    ) -> None:
        if not examples:
            raise InputError("there are no examples to train on; hold fewer out or give more completions")
        if options.patience and not held_out:
            raise InputError(f"patience {options.patience} needs evaluations: hold examples out, or give patience 0")
        self.target, self.module, self.objective = target, module, objective
        self.processes = processes or Processes()
        self.options, self.folder, self.log_kinds = options, folder, logs
        self.examples, self.held_out, self.plan = examples, held_out, dict(plan or {})
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(module),
            lr=options.lr,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,
        )
        groups = list(batches(examples, options.batch_tokens, seed=options.seed))
        if not any(map(objective.predictions, groups)):
            raise InputError(f"none of the {len(examples):,} examples has a token to predict; give longer completions")
        if states is not None and options.keep_states == "none":
            raise InputError("a folder of kept states needs a form to keep them in; use --keep-states exact, or int8")
        self.states: KeptStates | None = None
        # the processes that share the layers of a target have to compute the same passes
        if options.keep_states != "none" and not self.processes.sharded:
            nf4 = options.target_format == "nf4"  # otherwise the frozen pass runs on the target as it was loaded
            identity = json.dumps([*(self.plan.get(name) for name in _COMPUTED), nf4])
            whole = [*examples, *held_out]
            place, shared, form = states or folder, states is not None, options.keep_states
            self.states = KeptStates(place, target, whole, identity=identity, form=form, shared=shared, say=say)
            objective.keep(self.states.keeping)
        self.per_epoch = len(groups)
        self.steps = max(1, math.ceil(self.per_epoch * options.epochs))
        self.warmup = options.warmup_of(self.steps)
        self.evaluate_every = options.evaluate_every or max(10, min(200, self.steps // 6))
        self.best = Best(options.patience)
        self.done = 0  # updates applied
        self.seconds = 0.0  # that they took, evaluations in between included, over all runs from the same checkpoints
        self._right = torch.zeros(objective.predictors)
        self._count = torch.zeros(objective.predictors)
        self._digest = digest(examples)
        self._began = _weights(module)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.options.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.options.schedule == "cosine" else 1 - done
        return self.options.lr * max(fall, 0.02)

    def epoch(self, number: int) -> Iterator[tuple[Batch, list[Part]]]:
        """The batches of an epoch in order, each with this process's shares."""
        for batch in batches(self.examples, self.options.batch_tokens, seed=self.options.seed + number):
            yield batch, [(share, partial(self.objective.freeze, share.batch)) for share in self._shares(batch)]

    def _shares(self, batch: Batch) -> list[Share]:
        return shares(batch, self.objective.segments, self.processes, self.options.accumulate)

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = self.target.dtype
        reduced = dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.target.device.type, dtype=dtype, enabled=reduced)

    def step(self, batch: Batch, parts: Sequence[Part], rate: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One update; returns the loss per prediction, right predictions and predictions by predictor.

        ``parts`` are this process's shares of ``batch``; the gradients of all are added. A batch without predictions
        changes nothing.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["times"]
        self.module.prepare(self.target, self.objective.options, self.done)
        self.optimizer.zero_grad(set_to_none=True)  # before the step, since an interrupted one leaves gradients
        right, count, loss = torch.zeros_like(self._right), torch.zeros_like(self._count), 0.0
        wanted = self.objective.predictions(batch)
        for share, states in parts if wanted else ():
            frozen = states()
            for segment, weight in share.weighted(self.objective.segments):
                with self._autocast(), recomputing(self.options.recompute):
                    scores = self.objective.loss(share.batch, frozen, segment)
                (weight * scores.loss / wanted).backward()  # type: ignore[no-untyped-call]
                loss += weight * float(scores.loss.detach())
                right += weight * scores.right_S.cpu()
                count += weight * scores.count_S.cpu()
        loss, right, count = self._summed(loss, right, count)
        groups = self.module.clipped(self.objective.options)
        norm = math.hypot(*(float(nn.utils.clip_grad_norm_(group, self.options.clip)) for group in groups))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FileError(self._diverged(batch, loss, norm))
        with shielded():  # a run cannot resume from partly updated weights
            self.optimizer.step()
            self.done += 1
        return loss / max(1.0, float(count.sum())), right, count

    def _summed(
        self, loss: float, right: torch.Tensor, count: torch.Tensor
    ) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Sum gradients, loss, correct and total predictions of all processes."""
        if self.processes.count == 1:
            return loss, right, count
        whole = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        sums = torch.cat((torch.tensor([loss], dtype=torch.float64), right.double(), count.double()))
        used = torch.tensor([float(parameter.grad is not None) for parameter in whole])
        sums = self.processes.add(torch.cat((sums, used.double())))
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in whole])
        flat = self.processes.add(flat)
        parts = torch.split(flat, [parameter.numel() for parameter in whole])
        for parameter, gradient, anywhere in zip(whole, parts, sums[-len(whole) :].tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter) if anywhere else None
        right, count = sums[1 : -len(whole)].float().chunk(2)
        return float(sums[0]), right, count

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

        With ``patience``, the run ends after as many evaluations without gain, and the module has the weights of
        ``best`` afterwards.

        On KeyboardInterrupt (Ctrl-C, and SIGTERM under ``sigterm_raises``) a checkpoint is saved first; a resumed run
        yields the same weights as an uninterrupted one. Raises FileError if another process trains in the folder, if
        it contains a run with other options, another config or other examples, or if the loss is not finite.
        """
        with alone(self.folder) if self.processes.first else nullcontext():
            return self._run(report, resume=resume)

    def _run(self, report: Callable[[Progress], None], *, resume: bool) -> dict[str, Any]:
        self._restore(resume)
        if self.options.patience and self.best.seen < self.done and self._evaluates():
            self._evaluate_now()  # the run was stopped in that evaluation
        if not self.processes.first:
            self._train(report, None)
        else:
            with closing(Logs(self.folder, self.log_kinds, self.objective.predictors, self.done)) as logs:
                self._train(report, logs)
        self.best.put_back(self.module)
        evaluation = self.evaluate(nodes=TREES) if self.held_out and self.evaluating else {}
        if self.states is not None and self.processes.first:
            self.states.remove()
        return evaluation

    @property
    def evaluating(self) -> bool:
        """True in the first process, or in all where a pass needs the weights of all."""
        return self.processes.first or self.processes.sharded

    def _train(self, report: Callable[[Progress], None], logs: Logs | None) -> None:
        """The remaining steps; ``logs`` are the first process's. Several processes stop after the same step."""
        first, saved, positions, began = self.done, self.done, 0, time.monotonic()
        before = self.seconds
        together = self.processes.count > 1
        deferred: AbstractContextManager[list[int]] = shielded() if together else nullcontext([])
        try:
            with deferred as signals:
                for batch, parts in self._left(first):
                    loss, right, count = self.step(batch, parts, self.rate(self.done))
                    self._right, self._count = 0.95 * self._right + right, 0.95 * self._count + count
                    positions += int(count[0])
                    evaluation = self._evaluate_now() if self._evaluates() else None
                    taken = time.monotonic() - began
                    self.seconds = before + taken
                    accuracy = tuple((self._right / self._count.clamp(min=1)).tolist())
                    left = taken / (self.done - first) * (self.steps - self.done)
                    speed = positions / max(taken, 1e-9)
                    if logs is not None:
                        now = Progress(self.done, self.steps, loss, accuracy, speed, left, evaluation)
                        self._report(report, logs, now)
                    if self.done % self.options.checkpoint_every == 0:
                        self._save()
                        saved = self.done
                    if together and float(self.processes.add(torch.tensor([float(len(signals))]))):
                        raise KeyboardInterrupt
        finally:
            if self.done > saved:
                self._save()

    def _evaluate_now(self) -> dict[str, Any]:
        """Evaluate on the first held-out examples, and keep the weights if they are the best so far."""
        evaluation = self.evaluate(self.options.evaluate_rows) if self.evaluating else {}
        evaluation = self.processes.broadcast(evaluation)
        with shielded():
            self.best.see(self.done, evaluation, self.module)
        return evaluation

    def _evaluates(self) -> bool:
        """True if an evaluation on the first held-out examples follows the last step."""
        if not self.held_out or self.done < self.steps:
            return bool(self.held_out) and self.done % self.evaluate_every == 0
        # otherwise the final evaluation has the same examples; the best weights are chosen before it
        return self.options.patience > 0 or len(self.held_out) > self.options.evaluate_rows

    def _left(self, done: int) -> Iterator[tuple[Batch, list[Part]]]:
        """The batches that remain after ``done`` steps, as long as there is gain."""
        for number in itertools.count(done // self.per_epoch):
            for index, item in enumerate(self.epoch(number), number * self.per_epoch):
                if index >= self.steps or self.best.exhausted:
                    return
                if index >= done:
                    yield item

    def _restore(self, resume: bool) -> None:
        mine = (self._digest, self._began)
        differs = torch.tensor([float(self.processes.broadcast(mine) != mine)])
        if float(self.processes.add(differs)):
            raise InputError(
                "the processes have other examples or initial weights; give all the same files and options"
            )
        stored = read_checkpoint(self.folder) if resume else None
        if stored is None:
            if self.processes.first:
                drop_run(self.folder)
            return
        self._agree(stored)
        load_checkpoint(self.folder, self.module, self.optimizer)
        self.best = Best.restored(self.options.patience, stored.get("best"), load_weights(self.folder, BEST))
        self.done, self.seconds = int(stored["step"]), float(stored.get("seconds", 0.0))
        if "right" in stored:
            self._right, self._count = torch.tensor(stored["right"]), torch.tensor(stored["count"])
        if self.processes.first:
            trim_log(self.folder, self.done)

    def _agree(self, stored: Mapping[str, Any]) -> None:
        """Raise FileError, naming the differences, if a stored run was started differently."""
        for name in _WHOSE:
            if stored.get("plan", {}).get(name, self.plan.get(name)) != self.plan.get(name):
                raise FileError(
                    f"the run in {self.folder} belongs to another {name} ({stored['plan'][name]}, now "
                    f"{self.plan.get(name)}); give another folder, or start over with --no-resume"
                )
        identity = self._identity()
        other = [name for part in ("config", "options", "loss") for name in _other(stored.get(part), identity[part])]
        if made := [name for name in _MADE if stored.get(name, identity[name]) != identity[name]]:
            other += _other(stored.get("plan"), self.plan)
        if made and not other:
            other = [f"other {made[0]} ({_MADE[made[0]]})"]
        if other:
            raise FileError(
                f"the run in {self.folder} was started with {', '.join(other)}; use that, another folder, or start "
                "over with --no-resume"
            )

    def _identity(self) -> dict[str, Any]:
        """The settings and data that must be equal to resume a run."""
        parts = {
            "config": self.module.config.to_dict(),
            "options": asdict(self.options),
            "loss": asdict(self.objective.options),
        }
        return {**json.loads(json.dumps(parts)), "examples": self._digest, "initial weights": self._began}

    def _save(self) -> None:
        if not self.processes.first:
            return
        accuracy = {"right": self._right.tolist(), "count": self._count.tolist()}
        made = {"step": self.done, "seconds": self.seconds}
        record = {**made, **self._identity(), "plan": self.plan, **accuracy, "best": self.best.record()}
        with shielded():  # a second signal waits until the checkpoint is written
            save_checkpoint(self.folder, self.module, self.optimizer, record, self.best.weights)

    def _report(self, report: Callable[[Progress], None], logs: Logs, progress: Progress) -> None:
        report(progress)
        if progress.step % 10 == 0 or progress.step == progress.steps or progress.evaluation is not None:
            line = {**asdict(progress), "accuracy": [round(a, 4) for a in progress.accuracy]}
            logs.write({name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()})


def _other(stored: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Each field that differs, with both values: "epochs 3.0 (now 2.0)"."""
    before: Mapping[str, Any] = stored if isinstance(stored, Mapping) else {}
    changed = [name for name in before if name not in _FREE and before[name] != wanted.get(name)]
    return [f"{name} {before[name]} (now {wanted.get(name)})" for name in changed]


def _parameter_groups(module: Trainable) -> list[dict[str, Any]]:
    """The parameters for the optimizer, by the multiple of the learning rate that they have."""
    rates = module.rates()
    groups: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, parameter in module.named_parameters():
        groups.setdefault(rates.get(name, 1.0), []).append(parameter)
    return [{"params": parameters, "times": times} for times, parameters in groups.items() if parameters]


def _weights(module: Trainable) -> str:
    """The identity of a module's weights and draft vocabulary: a SHA-256 in hex."""
    seen = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        seen.update(name.encode())
        seen.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
