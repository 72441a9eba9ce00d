"""From a target, a recipe and examples to an adapter folder: what ``anabranch train streams`` does.

FOLDER/adapter_config.json, adapter.safetensors, README.md    the adapter, written at the end
FOLDER/training/                                              checkpoint and log; may be deleted afterwards
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anabranch.adapters.folder import TargetIdentity, load_adapter, save_adapter
from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.files import check_folder
from anabranch.jsonfiles import read_json
from anabranch.memory import keep_memory
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.model.load import Target
from anabranch.model.pack import pack_decoder
from anabranch.train.advice import Watch, before
from anabranch.train.answers import settings_path
from anabranch.train.checkpoint import read_log
from anabranch.train.data import Example, frequent_tokens, read_examples, read_texts, split
from anabranch.train.recipes import Recipe
from anabranch.train.trainer import TREES, Progress, Trainer

__all__ = ["check_data", "check_folder_is_free", "read_data", "train_streams"]


def check_data(answers: Path | None, text: Path | None, init: Path | None = None) -> None:
    """Check that what a training reads is there, before a model is loaded for it. Raises InputError or FileError."""
    if (answers is None) == (text is None):
        raise InputError("give either an answers file (--answers) or plain text (--text)")
    path = answers or text
    if path is not None and not path.is_file():
        hint = (
            "write one with 'anabranch train answers'" if answers else "give a text file or JSONL with a field 'text'"
        )
        raise FileError(f"there is no file {path}; {hint}")
    if init is not None and not (init / "adapter_config.json").is_file():
        raise FileError(f"--init {init} holds no adapter (no adapter_config.json); give an adapter folder")


def check_folder_is_free(folder: Path, *, force: bool) -> None:
    """Check that an adapter can be written to ``folder`` and that no finished one is replaced unless ``force`` says so.

    An unfinished run in it is no obstacle: a training goes on with it. Raises FileError.
    """
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file; give --out a folder")
    check_folder(folder, "the adapter", "folder (--out)")
    if (folder / "adapter_config.json").exists() and not force:
        raise FileError(f"{folder} holds a finished adapter; give another --out, or --force to replace it")


def read_data(
    target: Target, recipe: Recipe, *, answers: Path | None = None, text: Path | None = None
) -> list[Example]:
    """The examples of an answers file or of plain text; exactly one of them is given.

    Raises FileError where the answers are known to be another target's: streams learn what their target says.
    """
    check_data(answers, text)
    max_tokens = min(recipe.max_tokens, target.config.max_positions)
    if text is not None:
        return read_texts(text, target.tokenizer, max_tokens=max_tokens)
    assert answers is not None
    settings = settings_path(answers)
    if settings.is_file():
        written = read_json(settings, "delete it if the answers are this target's").get("fingerprint")
        if written != target.fingerprint:
            raise FileError(
                f"{answers} was written by another target (fingerprint {str(written)[:12]}) than {target.name} "
                f"(fingerprint {target.fingerprint[:12]}); write answers with this one"
            )
    return read_examples(answers, vocab_size=target.config.vocab_size, max_tokens=max_tokens)


def train_streams(
    target: Target,
    recipe: Recipe,
    examples: list[Example],
    folder: Path,
    *,
    report: Callable[[Progress], None],
    init: Path | None = None,
    resume: bool = True,
    command: str = "",
    licences: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train an adapter and write its folder; returns its record (``adapter_config.json``).

    init      adapter folder whose weights to begin with, of the same target and the same streams (it may lack the root
              term and have fewer streams: new ones begin as its last one; and fewer layers: new ones, below its own,
              begin at zero); the draft vocabulary is drawn anew
    command   how to repeat this, for the card
    licences  of the data by source, for the card
    """
    keep_memory()
    training, held_out = split(examples, recipe.held_out, recipe.options.seed)
    size, vocabulary = recipe.draft_vocabulary, None
    if 0 < size < target.config.vocab_size:
        always = [token for token in (*target.config.eos_token_ids, target.config.bos_token_id) if token is not None]
        vocabulary = frequent_tokens(training, size, target.config.vocab_size, always)
    torch.manual_seed(recipe.options.seed)  # initial weights; nothing else of a training is random but its order
    adapter = StreamAdapter(target.config, recipe.streams, vocabulary).to(target.decoder.device)
    begun = None if init is None else _begin_with(adapter, init, target)
    frozen = target.decoder
    if target.decoder.device.type == "cpu" or target.quantize != "none":  # else there is nothing to pack
        copied = copy.deepcopy(target.decoder)
        frozen = copied if pack_decoder(copied) else frozen
    plan = {name: getattr(recipe, name) for name in ("draft_vocabulary", "held_out", "max_tokens")}
    check_folder(folder, "the adapter", "folder (--out)")
    run = folder / "training"
    trainer = Trainer(target.decoder, adapter, training, held_out, recipe.options, run, frozen=frozen, plan=plan)
    longest = min(recipe.max_tokens, target.config.max_positions)
    _warn(before(training, recipe.options, trainer.steps, adapter.num_parameters(), max_tokens=longest))
    watch = Watch(bool(held_out))

    def watched(progress: Progress) -> None:
        report(progress)
        if progress.step % 10 == 0 or progress.evaluation is not None:
            _warn(watch.see(read_log(run), progress))

    evaluation = trainer.run(watched, resume=resume)
    measured = _measured(evaluation, len(held_out)) if held_out else {}
    sources = Counter(example.source for example in training)
    record = {
        "command": command,
        **({} if begun is None else {"init": begun}),
        "data": [
            {"source": source, "examples": count, "licence": (licences or {}).get(source, "")}
            for source, count in sorted(sources.items())
        ],
        "examples": len(training),
        "answer_tokens": sum(len(example.answer_ids) for example in training),
        "steps": trainer.done,
        "options": asdict(recipe.options),
        "held_out": recipe.held_out,
        "max_tokens": recipe.max_tokens,
    }
    return save_adapter(folder, adapter, target=TargetIdentity.of(target), training=record, measured=measured)


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warnings.warn(sentence, TrainingWarning, stacklevel=3)


def _measured(evaluation: Mapping[str, Any], held_out: int) -> dict[str, Any]:
    """An evaluation under names that say what each value is, for the record and its card."""
    lengths = ("tree", *(f"{nodes} nodes" for nodes in TREES), "chain", "tree without conditioning", "by source")
    tops = {name.removeprefix("top "): shares for name, shares in evaluation.items() if name.startswith("top ")}
    accuracy = {"best token" if top == "1" else f"one of the {top} best": shares for top, shares in tops.items()}
    return {
        "held-out answers": held_out,
        "predicted mean acceptance length": {name: evaluation[name] for name in lengths if name in evaluation},
        "accuracy by stream": accuracy,
        "share of drafted steps that accept at least 1, 2, ... tokens": evaluation["at least"],
    }


def _begin_with(adapter: StreamAdapter, init: Path, target: Target) -> str:
    """Copy the weights of an adapter folder into ``adapter``; returns the SHA-256 that the folder's record states."""
    loaded = load_adapter(init, target)
    mine, theirs = adapter.config.to_dict(), loaded.adapter.config.to_dict()
    if not theirs["root_width"]:
        theirs["root_width"] = mine["root_width"]  # a root term begins at zero: it changes nothing yet
    more = mine["num_streams"] - theirs["num_streams"]
    lower = mine["num_stream_layers"] - theirs["num_stream_layers"]
    for name, grows in (("num_streams", more), ("num_stream_layers", lower)):
        theirs[name] = mine[name] if grows > 0 else theirs[name]
    if mine != theirs:
        name = next(name for name in mine if mine[name] != theirs[name])
        raise InputError(
            f"the adapter in {init} has {name} {theirs[name]!r}, and this training asks for {mine[name]!r}; "
            "begin with another adapter or give the same option"
        )
    weights = {name: value for name, value in loaded.adapter.state_dict().items() if name != "vocabulary"}
    for name in ("embeddings", "root.streams"):  # what each stream has of its own
        if more > 0 and name in weights:
            weights[name] = torch.cat((weights[name], weights[name][-1:].expand(more, -1)))
    moved = {}  # the layers stay at the top of the target
    for name in [name for name in weights if name.startswith("layers.") and lower > 0]:
        _, index, rest = name.split(".", 2)
        moved[f"layers.{int(index) + lower}.{rest}"] = weights.pop(name)
    adapter.load_state_dict(weights | moved, strict=False)
    return str(loaded.record["sha256"])
