"""Train a module for a target, from examples to its weights and the record of the run: what all trainings share.

RUN/    checkpoint and log (``train.checkpoint``); may be deleted afterwards
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from anabranch.drafting.trained import Trainable
from anabranch.errors import CapabilityError, DeviceError, InputError, TrainingWarning
from anabranch.learning.examples import Example
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe
from anabranch.methods.tuning import QUALITY, TunedObjective
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target, load_target
from anabranch.model.pack import pack_decoder
from anabranch.model.training_formats import Nf4Linear
from anabranch.support.log import LOGGER
from anabranch.support.memory import keep_memory, peak_memory_mb
from anabranch.train.advice import Watch, before
from anabranch.train.arithmetic import ARITHMETIC, chosen_dtype, chosen_for_packed, learner_of, packed_learner
from anabranch.train.checkpoint import read_checkpoint, read_log
from anabranch.train.data import digest, split
from anabranch.train.logs import check_logs
from anabranch.train.processes import Processes
from anabranch.train.trainer import TREES, Progress, Trainer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Fitted", "RunOptions", "Subject", "divided", "fit", "packed_copy", "stored_target"]

OWN = "own prompts"  # name of the evaluation on the user's prompts


class RunOptions(TypedDict, total=False):
    """Options of a training run, apart from its recipe.

    report      receives the progress of each step
    resume      continue the run in the folder, if there is one
    command     the command to repeat the training, for the card
    licences    licences of the data by source, for the card
    validation  the held-out examples; None: some of the examples are set aside
    own         further examples to evaluate on at the end: completions of the user's prompts. Examples with the same
                prompts are not trained on
    facts       more to say about the data in the record
    logs        kinds of logs besides log.jsonl: csv, tensorboard
    processes   those that share the training. Only the first one reports and writes
    states      a folder for the target's states, if they are kept, which trainings on the same examples share
    shard_target  keep a part of the target's layers in each process only
    say         receives a line with the size of the file that keeps the target's states

    With ``shard_target`` or ``target_format`` nf4, ``target.decoder`` is changed in place, and ``stored_target`` loads
    it again.
    """

    report: Callable[[Progress], None]
    resume: bool
    command: str
    licences: Mapping[str, str]
    validation: Sequence[Example] | None
    own: Sequence[Example]
    facts: Mapping[str, Any] | None
    logs: Sequence[str]
    processes: Processes | None
    states: Path | None
    shard_target: bool
    say: Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A module to train.

    name       of the method, which a run in a folder belongs to
    make       (training examples, the decoder for passes without gradients) -> the module with its initial weights, and
               what the record says of them, if anything
    objective  as ``Trained.learn``
    packed     as ``Trained.packed``
    packs      whether the training runs the frozen target often, so that a packed copy of it pays
    """

    name: str
    make: Callable[[Sequence[Example], Decoder], tuple[Trainable, str | None]]
    objective: Callable[..., Objective[Any]]
    packs: bool = True
    packed: Callable[[Recipe], bool] = lambda recipe: False


@dataclass(frozen=True)
class Fitted:
    """A trained module, the record of its training, and its evaluations on held-out examples."""

    module: Any
    training: dict[str, Any]
    measured: dict[str, Any]


def fit(
    target: Target,
    subject: Subject,
    recipe: Recipe,
    examples: Sequence[Example],
    run: Path,
    **options: Unpack[RunOptions],
) -> Fitted | None:
    """Train a module in the folder ``run``; None in all processes but the first one.

    Raises InputError if an example is longer than the target's context, and what ``Trainer`` raises.
    """
    logs, own = options.get("logs", ()), options.get("own", ())
    validation, resume = options.get("validation"), options.get("resume", True)
    processes = options.get("processes") or Processes()
    check_logs(logs)
    _check_lengths(target, (*examples, *(validation or ()), *own))
    keep_memory()
    reserved = {example.question for example in own}
    training, held_out = divided([e for e in examples if e.question not in reserved], validation, recipe)
    torch.manual_seed(recipe.options.seed)  # for the initial weights; besides, only the order of batches is random
    stored, sharding = read_checkpoint(run) if resume else None, options.get("shard_target", False)
    saving = sharding or recipe.options.target_format == "nf4"  # memory, which a copy would take
    frozen = packed_copy(target) if subject.packs and not saving else target.decoder
    module, begun = subject.make(training, frozen)
    learner, arithmetic = _learner(target, subject, module, recipe, processes, stored, sharding=sharding)
    objective = subject.objective(learner, module, recipe, frozen=frozen)
    whose = {"method": subject.name, "target": target.fingerprint[:12], "quantize": target.quantize}
    plan = {**whose, **_made_with(recipe), ARITHMETIC: arithmetic}
    trainer = Trainer(
        *(learner, module, objective, training, held_out, recipe.options, run),
        plan=plan,
        logs=logs,
        processes=processes,
        states=options.get("states"),
        say=options.get("say", LOGGER.info),
    )
    if processes.first:
        # a start from trained weights, or from terms that are zero, needs few data
        fresh = module.num_parameters() if begun is None and subject.packs else 0
        longest = min(recipe.max_tokens, target.config.max_positions)
        _warn(before(training, recipe.options, trainer.steps, fresh, max_tokens=longest))
    untuned: dict[str, float] = {}
    if isinstance(objective, TunedObjective) and held_out and trainer.evaluating:
        untuned = objective.untuned(held_out)
    with _not_after_fork():
        evaluation = trainer.run(_watched(options.get("report"), run, held_out=bool(held_out)), resume=resume)
    on_own = trainer.evaluate_on(own) if own and trainer.evaluating else {}
    if not processes.first:
        return None
    measured = _as_measured(evaluation, len(held_out), objective.predictor) if held_out else {}
    if untuned:
        measured[QUALITY] = {"untuned": untuned, "tuned": evaluation[QUALITY]}
    if own:
        measured[OWN] = _as_measured(on_own, len(own), objective.predictor)
    record = {
        "command": options.get("command", ""),
        **({} if begun is None else {"init": begun}),
        "data": _sources(training, options.get("licences") or {}),
        **(options.get("facts") or {}),
        **_run_record(trainer, recipe),
        "peak_memory_mb": peak_memory_mb(learner.device),
        ARITHMETIC: arithmetic.replace("torch.", ""),
    }
    return Fitted(module, record, measured)


def _run_record(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
    """The data, length and options of a run."""
    training = trainer.examples
    return {
        "examples": len(training),
        "answer_tokens": sum(len(example.answer_ids) for example in training),
        "data_sha256": digest(training),
        "steps": trainer.done,
        **_stopping(trainer),
        "seconds": round(trainer.seconds, 1),
        "options": {**asdict(recipe.options), "warmup": trainer.warmup, "loss": asdict(recipe.loss)},
        "held_out": len(trainer.held_out),
        "max_tokens": recipe.max_tokens,
    }


@contextmanager
def _not_after_fork() -> Iterator[None]:
    """Say what to do where PyTorch cannot train in a forked process: its parent has used a GPU."""
    try:
        yield
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        raise DeviceError(
            "a process that was forked from one that uses a GPU cannot train; start it with multiprocessing's method "
            "'spawn', or train in a program of its own"
        ) from error


def _watched(report: Callable[[Progress], None] | None, run: Path, *, held_out: bool) -> Callable[[Progress], None]:
    """Report progress, and warn where the curves call for it."""
    watch = Watch(held_out)

    def watched(progress: Progress) -> None:
        if report is not None:
            report(progress)
        if progress.step % 10 == 0 or progress.evaluation is not None:
            _warn(watch.see(read_log(run), progress))

    return watched


def divided(
    examples: Sequence[Example], validation: Sequence[Example] | None, recipe: Recipe
) -> tuple[list[Example], list[Example]]:
    """The examples to train on and the held-out ones: ``validation``, or where it is None, some of ``examples``."""
    if validation is not None:
        return list(examples), list(validation)
    return split(examples, recipe.held_out_of(len(examples)), recipe.options.seed)


def _check_lengths(target: Target, examples: Iterable[Example]) -> None:
    longest = target.config.max_positions
    for example in examples:
        if len(example) > longest:
            raise InputError(
                f"the example {example.name} has {len(example):,} tokens, and the target's context {longest:,}; cut "
                "it, or read it with read_data"
            )


def packed_copy(target: Target) -> Decoder:
    """The decoder for passes without gradients: a packed copy of the target's, or its own if that cannot be packed."""
    if target.quantize == "stored" or (target.decoder.device.type != "cpu" and target.quantize == "none"):
        return target.decoder
    copied = copy.deepcopy(target.decoder)
    return copied if pack_decoder(copied) else target.decoder


def _learner(
    target: Target,
    subject: Subject,
    module: Trainable,
    recipe: Recipe,
    processes: Processes,
    stored: Mapping[str, Any] | None,
    *,
    sharding: bool,
) -> tuple[Decoder, str]:
    """The decoder for passes with gradients, and its arithmetic.

    stored  the record of the run's checkpoint, whose arithmetic is kept

    Raises CapabilityError if the target cannot be had in this form.
    """
    form = recipe.options.target_format
    if target.quantize == "stored":
        if sharding or not subject.packed(recipe):
            what = "that is sharded" if sharding else f"{subject.name} of this recipe"
            raise CapabilityError(
                f"training {what} needs the target's weights as they are, and they are packed as the file stores them; "
                "load it with quantize='none'"
            )
        chosen = processes.broadcast(chosen_for_packed(target.decoder, form, stored, lowest=module.lowest))
        return packed_learner(target.decoder, module.lowest, chosen), chosen.name
    dtype = target.decoder.dtype
    if sharding:
        if form != "stored":
            raise CapabilityError(f"a target in {form} cannot be sharded; leave --target-format or --shard-target out")
        processes.shard(target.decoder)
        return target.decoder, str(dtype)
    if form != "nf4":
        dtype = processes.broadcast(chosen_dtype(target.decoder, form, stored))
    return learner_of(target.decoder, form, dtype), str(dtype)


def stored_target(target: Target) -> Target:
    """The target as it was loaded: again from its files if training has quantised or sharded it."""
    block = target.decoder.blocks[0]
    if type(block) is Block and not isinstance(block.qkv, Nf4Linear):  # sharding changes a block's class
        return target
    assert target.path is not None, "a target that is trained was loaded from somewhere"
    again = load_target(str(target.path), dtype=target.decoder.dtype, device=str(target.decoder.device))
    return replace(target, decoder=again.decoder)


def _stopping(trainer: Trainer) -> dict[str, Any]:
    """The result of early stopping, for the record; empty without it."""
    if not trainer.best.patience:
        return {}
    best = trainer.best
    return {
        "planned_steps": trainer.steps,
        "early_stopping": {"kept_step": best.step, "held_out": best.length, "evaluations_without_gain": best.waited},
    }


def _made_with(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine examples and vocabulary."""
    return {name: getattr(recipe, name) for name in ("draft_vocabulary", "held_out", "max_tokens")}


def _sources(training: Iterable[Example], licences: Mapping[str, str]) -> list[dict[str, Any]]:
    """The number of examples and the licence of each source, for the card."""
    counts = Counter(example.source for example in training)
    return [
        {"source": source, "examples": count, "licence": licences.get(source, "")}
        for source, count in sorted(counts.items())
    ]


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warnings.warn(sentence, TrainingWarning, stacklevel=3)


def _as_measured(evaluation: Mapping[str, Any], held_out: int, predictor: str) -> dict[str, Any]:
    """An evaluation with descriptive names, for the record and the card."""
    tops = {name.removeprefix("top "): shares for name, shares in evaluation.items() if name.startswith("top ")}
    accuracy = {"best token" if top == "1" else f"one of the {top} best": shares for top, shares in tops.items()}
    trees = ("tree", *(f"{nodes} nodes" for nodes in TREES))
    lengths = {name: value for name, value in evaluation.items() if isinstance(value, float)}
    order = [name for name in (*trees, *lengths) if name in lengths]
    if "tree" not in evaluation:  # nothing drafts
        return {"held-out answers": held_out}
    return {
        "held-out answers": held_out,
        "predicted mean acceptance length": {
            **{name: lengths[name] for name in order},
            "by source": evaluation["by source"],
        },
        f"accuracy by {predictor}": accuracy,
        "share of drafted steps that accept at least 1, 2, ... tokens": evaluation["at least"],
    }
