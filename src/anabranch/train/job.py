"""Train an adapter from a target, a recipe and examples, and write its folder: ``anabranch train METHOD``.

FOLDER/adapter_config.json, adapter.safetensors, README.md    the adapter, written at the end
FOLDER/training/                                              checkpoint and log; may be deleted afterwards
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.adapters.folder import TargetIdentity, save_adapter
from anabranch.errors import CapabilityError, FileError, InputError, TrainingWarning
from anabranch.learning.examples import Example
from anabranch.learning.recipe import Recipe
from anabranch.learning.target import run_frozen
from anabranch.methods import Method, methods
from anabranch.methods.tuning import Tunes, next_token_quality
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target, load_target
from anabranch.model.nf4 import Nf4Linear
from anabranch.model.pack import pack_decoder
from anabranch.support.files import check_folder
from anabranch.support.jsonfiles import read_json
from anabranch.support.memory import keep_memory
from anabranch.train.advice import Watch, before
from anabranch.train.appended import settings_path
from anabranch.train.arithmetic import ARITHMETIC, chosen_dtype, learner_of
from anabranch.train.checkpoint import read_checkpoint, read_log
from anabranch.train.data import check_first, digest, frequent_tokens, read_examples, read_texts, split
from anabranch.train.logs import check_logs
from anabranch.train.processes import Processes
from anabranch.train.start import adopted, begin, start_folder
from anabranch.train.trainer import QUALITY, TREES, Progress, Trainer

__all__ = [
    "OWN",
    "as_measured",
    "check_answers",
    "check_data",
    "check_folder_is_free",
    "divided",
    "packed_copy",
    "read_data",
    "sources",
    "stored_target",
    "train_adapter",
    "trainable",
]

OWN = "own prompts"  # what is measured on the user's prompts


def trainable(name: str | None = None) -> Method:
    """The trainable method of this name; without a name, the first one. Raises InputError."""
    known = [method for method in methods() if method.trained is not None]
    for method in known:
        if name in (None, method.name):
            return method
    raise InputError(f"the method {name!r} cannot be trained; give one of {', '.join(method.name for method in known)}")


def check_data(answers: Path | None, text: Path | None) -> None:
    """Check that the input file exists and how it begins, before a model is loaded. Raises InputError or FileError."""
    if (answers is None) == (text is None):
        raise InputError("give either a file of completions (--answers) or plain text (--text)")
    path = answers or text
    if path is not None and not path.is_file():
        hint = (
            "write one with 'anabranch train answers'" if answers else "give a text file or JSONL with a field 'text'"
        )
        raise FileError(f"there is no file {path}; {hint}")
    if path is not None:
        check_first(path, completions=answers is not None)


def check_folder_is_free(folder: Path, *, force: bool) -> None:
    """Check that an adapter can be written to ``folder``, which may contain a finished one only if ``force``.

    An unfinished run in it is resumed. Raises FileError.
    """
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file; give --out a folder")
    check_folder(folder, "the adapter", "folder (--out)")
    if (folder / "adapter_config.json").exists() and not force:
        raise FileError(f"{folder} contains a finished adapter; give another --out, or --force to replace it")


def check_answers(answers: Path, target: Target) -> None:
    """Check that completions are not known to be another target's. Raises FileError."""
    settings = settings_path(answers)
    if settings.is_file():
        written = read_json(settings, "delete it if the completions are this target's").get("fingerprint")
        if written != target.fingerprint:
            raise FileError(
                f"{answers} was written by another target (fingerprint {str(written)[:12]}) than {target.name} "
                f"(fingerprint {target.fingerprint[:12]}); write completions with this one"
            )


def read_data(
    target: Target, recipe: Recipe, *, answers: Path | None = None, text: Path | None = None
) -> list[Example]:
    """The examples of a file of completions or of plain text; give exactly one of them.

    Raises FileError if the completions are known to be another target's: a method learns its own target's output.
    """
    check_data(answers, text)
    max_tokens = min(recipe.max_tokens, target.config.max_positions)
    if text is not None:
        return read_texts(text, target.tokenizer, max_tokens=max_tokens)
    assert answers is not None
    check_answers(answers, target)
    return read_examples(answers, vocab_size=target.config.vocab_size, max_tokens=max_tokens)


def train_adapter(
    target: Target,
    method: Method,
    recipe: Recipe,
    examples: list[Example],
    folder: Path,
    *,
    report: Callable[[Progress], None],
    init: str | Path | None = None,
    resume: bool = True,
    command: str = "",
    licences: Mapping[str, str] | None = None,
    validation: Sequence[Example] | None = None,
    own: Sequence[Example] = (),
    facts: Mapping[str, Any] | None = None,
    logs: Sequence[str] = (),
    processes: Processes | None = None,
    shard_target: bool = False,
) -> dict[str, Any]:
    """Train an adapter for ``method`` and write its folder; returns its record (``adapter_config.json``).

    init      adapter folder of the same target and kind of module to start from, or the name of one that ships,
              "default" for the one that ships for the target, "none" for fresh weights; None: as the recipe says. The
              run takes its shape, but for what was set in the recipe; the draft vocabulary is chosen anew
    command   the command to repeat the training, for the card
    licences  licences of the data by source, for the card
    validation  the held-out examples; None: some of ``examples`` are set aside
    own       further examples to evaluate on at the end: completions of the user's prompts. Those of ``examples`` with
              the same prompts are left out
    facts     more to say about the data in the record
    logs      kinds of logs besides log.jsonl: csv, tensorboard
    processes those that share the training. Only the first one reports, writes and returns a record; in others it is {}
    shard_target  keep a part of the target's layers in each process only

    With ``shard_target`` or ``target_format`` nf4, ``target.decoder`` is changed in place, and ``stored_target`` loads
    it again. Raises InputError if an example is longer than the target's context.
    """
    if method.trained is None:
        raise CapabilityError(f"the method {method.name!r} has nothing to train; see 'anabranch train --help'")
    check_logs(logs)
    _check_lengths(target, (*examples, *(validation or ()), *own))
    keep_memory()
    asked = {example.prompt_ids for example in own}
    examples = [example for example in examples if example.prompt_ids not in asked]
    training, held_out = divided(examples, validation, recipe)
    start = start_folder(init, recipe, method, target)
    recipe = adopted(recipe, method, start)
    torch.manual_seed(recipe.options.seed)  # for the initial weights; besides, only the order of batches is random
    vocabulary = _vocabulary(target, recipe, training)
    module = method.trained.make(target.config, recipe.config, vocabulary).to(target.decoder.device)
    if method.trained.fresh is not None:
        method.trained.fresh(target.decoder, module)
    begun = None if start is None else begin(method, module, start, target)
    processes = processes or Processes()
    form = recipe.options.target_format
    in_place = shard_target or form == "nf4"
    if processes.first:
        check_folder(folder, "the adapter", "folder (--out)")
    run = folder / "training"
    dtype = target.decoder.dtype
    if not in_place:
        dtype = processes.tell(chosen_dtype(target.decoder, form, read_checkpoint(run) if resume else None))
    learner, frozen = _frozen(target, recipe, dtype, processes if shard_target else None)
    objective = method.trained.objective(learner, module, recipe, frozen=frozen)
    whose = {"method": method.name, "target": target.fingerprint[:12]}
    plan = {**whose, **_made_with(recipe), ARITHMETIC: str(dtype)}
    trainer = Trainer(
        *(learner, module, objective, training, held_out, recipe.options, run),
        plan=plan,
        logs=logs,
        processes=processes,
    )
    longest = min(recipe.max_tokens, target.config.max_positions)
    if processes.first:
        fresh = module.num_parameters() if begun is None else 0
        _warn(before(training, recipe.options, trainer.steps, fresh, max_tokens=longest))
    watch = Watch(bool(held_out))

    def watched(progress: Progress) -> None:
        report(progress)
        if progress.step % 10 == 0 or progress.evaluation is not None:
            _warn(watch.see(read_log(run), progress))

    untuned: dict[str, float] = {}
    if isinstance(objective, Tunes) and held_out and trainer.evaluating:
        untuned = next_token_quality(
            learner, lambda batch: run_frozen(learner, batch, frozen=frozen).hidden_BTD, held_out
        )
    evaluation = trainer.run(watched, resume=resume)
    on_own = trainer.evaluate_on(own) if own and trainer.evaluating else {}
    if not processes.first:
        return {}
    measured = as_measured(evaluation, len(held_out), objective.predictor) if held_out else {}
    if untuned:
        measured[QUALITY] = {"untuned": untuned, "tuned": evaluation[QUALITY]}
    if own:
        measured[OWN] = as_measured(on_own, len(own), objective.predictor)
    record = {
        "command": command,
        **({} if begun is None else {"init": begun}),
        "data": sources(training, licences or {}),
        **(facts or {}),
        "examples": len(training),
        "answer_tokens": sum(len(example.answer_ids) for example in training),
        "data_sha256": digest(training),
        "steps": trainer.done,
        **_stopping(trainer),
        "seconds": round(trainer.seconds, 1),
        ARITHMETIC: str(dtype).removeprefix("torch."),
        "options": {**asdict(recipe.options), "warmup": trainer.warmup, "loss": asdict(recipe.loss)},
        "held_out": len(held_out),
        "max_tokens": recipe.max_tokens,
    }
    identity = TargetIdentity.of(target)
    if method.trained.export is not None:
        del trainer, objective, learner, frozen  # a tuned target is written from the stored weights
        made = method.trained.export(folder / "model", module, stored_target(target))
        if made is not None:
            module, tuned = made
            name, identity = identity.name, TargetIdentity.of(tuned)
            if target.lora is None:  # then the terms are written as a LoRA, too
                identity = replace(identity, name=name, lora="lora")
    return save_adapter(folder, module, method=method, target=identity, training=record, measured=measured)


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


def _vocabulary(target: Target, recipe: Recipe, training: list[Example]) -> Tensor | None:
    size = recipe.draft_vocabulary
    if not 0 < size < target.config.vocab_size:
        return None
    always = [token for token in (*target.config.eos_token_ids, target.config.bos_token_id) if token is not None]
    return frequent_tokens(training, size, target.config.vocab_size, always)


def packed_copy(target: Target) -> Decoder:
    """The decoder for passes without gradients: a packed copy of the target's, or its own if that cannot be packed."""
    if target.decoder.device.type != "cpu" and target.quantize == "none":
        return target.decoder
    copied = copy.deepcopy(target.decoder)
    return copied if pack_decoder(copied) else target.decoder


def _frozen(target: Target, recipe: Recipe, dtype: torch.dtype, sharing: Processes | None) -> tuple[Decoder, Decoder]:
    """The decoders for passes with and without gradients; ``sharing`` are the processes that share the target."""
    form = recipe.options.target_format
    if sharing is not None:
        if form != "stored":
            raise CapabilityError(f"a target in {form} cannot be sharded; leave --target-format or --shard-target out")
        sharing.shard(target.decoder)
        return target.decoder, target.decoder
    learner = learner_of(target.decoder, form, dtype)
    return learner, target.decoder if form == "nf4" else packed_copy(target)


def stored_target(target: Target) -> Target:
    """The target as it was loaded: again from its files if training has quantised or sharded it."""
    block = target.decoder.blocks[0]
    if type(block) is Block and not isinstance(block.qkv, Nf4Linear):  # sharding changes a block's class
        return target
    assert target.path is not None, "a target that is trained was loaded from somewhere"
    again = load_target(str(target.path), dtype=target.decoder.dtype, device=str(target.decoder.device))
    return replace(target, decoder=again.decoder)


def _stopping(trainer: Trainer) -> dict[str, Any]:
    """How early stopping ended a run, for its record; empty without it."""
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


def sources(training: Iterable[Example], licences: Mapping[str, str]) -> list[dict[str, Any]]:
    """The number of examples and the licence of each source, for the card."""
    counts = Counter(example.source for example in training)
    return [
        {"source": source, "examples": count, "licence": licences.get(source, "")}
        for source, count in sorted(counts.items())
    ]


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warnings.warn(sentence, TrainingWarning, stacklevel=3)


def as_measured(evaluation: Mapping[str, Any], held_out: int, predictor: str) -> dict[str, Any]:
    """An evaluation with descriptive names, for the record and the card."""
    tops = {name.removeprefix("top "): shares for name, shares in evaluation.items() if name.startswith("top ")}
    accuracy = {"best token" if top == "1" else f"one of the {top} best": shares for top, shares in tops.items()}
    trees = ("tree", *(f"{nodes} nodes" for nodes in TREES))
    lengths = {name: value for name, value in evaluation.items() if isinstance(value, float)}
    order = [name for name in (*trees, *lengths) if name in lengths]
    return {
        "held-out answers": held_out,
        "predicted mean acceptance length": {
            **{name: lengths[name] for name in order},
            "by source": evaluation["by source"],
        },
        f"accuracy by {predictor}": accuracy,
        "share of drafted steps that accept at least 1, 2, ... tokens": evaluation["at least"],
    }
