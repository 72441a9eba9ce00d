"""Fine-tune a target with LoRA and write a folder in PEFT's format: ``anabranch train lora``.

FOLDER/adapter_config.json, adapter_model.safetensors    the LoRA, written at the end
FOLDER/README.md, training.json                          its card, for people and for programs
FOLDER/training/                                         checkpoint and log; may be deleted afterwards
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import Recipe
from anabranch.model.load import Target, base_name
from anabranch.model.lora import Lora
from anabranch.model.peft import read_lora, read_settings, write_lora
from anabranch.support.files import check_folder, write_atomically
from anabranch.support.memory import keep_memory
from anabranch.train.arithmetic import ARITHMETIC, chosen_dtype, learner_of
from anabranch.train.checkpoint import read_checkpoint
from anabranch.train.data import digest, read_examples, read_texts
from anabranch.train.job import check_data, divided, sources
from anabranch.train.lora import LoraLayers, LoraObjective, fresh_lora
from anabranch.train.trainer import Progress, Trainer

__all__ = ["RECORD", "check_init", "read_completions", "train_lora"]

CARD, RECORD = "README.md", "training.json"


def check_init(init: Path | None, given: Mapping[str, Any]) -> None:
    """Check ``--init`` against the recipe's values that are ``given``, before a model is loaded.

    Raises InputError where it contradicts them, and AdapterError for a folder that is not a LoRA.
    """
    if init is None:
        return
    read_settings(init)
    if fixed := [name for name in ("rank", "alpha", "modules") if name in given]:
        raise InputError(f"--init {init} has its own rank, alpha and modules; leave out --{fixed[0]}")


def read_completions(
    target: Target, recipe: Recipe, *, answers: Path | None = None, text: Path | None = None
) -> list[Example]:
    """The examples of a file of completions, whoever wrote them, or of plain text; give exactly one of them.

    Raises InputError, and FileError that names a malformed line.
    """
    check_data(answers, text)
    max_tokens = min(recipe.max_tokens, target.config.max_positions)
    if answers is not None:
        return read_examples(answers, vocab_size=target.config.vocab_size, max_tokens=max_tokens)
    assert text is not None
    return read_texts(text, target.tokenizer, max_tokens=max_tokens)


def train_lora(
    target: Target,
    recipe: Recipe,
    examples: Sequence[Example],
    folder: Path,
    *,
    report: Callable[[Progress], None],
    init: Path | None = None,
    resume: bool = True,
    command: str = "",
    licences: Mapping[str, str] | None = None,
    validation: Sequence[Example] | None = None,
) -> dict[str, Any]:
    """Train low-rank terms for ``target`` and write them as a LoRA folder; returns the record (training.json).

    init        LoRA folder in PEFT's format to start from, with its own ranks, scales and modules
    command     the command to repeat the training, for the card
    licences    licences of the data by source, for the card
    validation  the held-out examples; None: some of ``examples`` are set aside

    Raises CapabilityError for a target that is quantised or has a LoRA already, AdapterError for an ``init`` that does
    not fit it, and what ``Trainer`` raises.
    """
    if target.lora is not None:
        raise CapabilityError("a LoRA belongs to a model without one; continue the training of a LoRA with --init")
    keep_memory()
    training, held_out = divided(examples, validation, recipe)
    torch.manual_seed(recipe.options.seed)  # for the initial terms; besides, only the order of batches is random
    begun = fresh_lora(target.config, recipe.config) if init is None else read_lora(init, target.config)
    module = LoraLayers(target.config, begun).to(target.decoder.device)
    check_folder(folder, "the LoRA", "folder (--out)")
    run = folder / "training"
    form = recipe.options.target_format
    dtype = chosen_dtype(target.decoder, form, read_checkpoint(run) if resume else None)
    learner = learner_of(target.decoder, form, dtype)
    objective = LoraObjective(learner, module)
    plan = {
        "method": "lora",
        "target": target.fingerprint[:12],
        "held_out": recipe.held_out,
        "max_tokens": recipe.max_tokens,
        ARITHMETIC: str(dtype),
    }
    trainer = Trainer(learner, module, objective, training, held_out, recipe.options, run, plan=plan)
    before = trainer.evaluate() if held_out else {}
    after = trainer.run(report, resume=resume)
    record = {
        "base": base_name(target),
        "base_fingerprint": target.fingerprint,
        "terms": module.config.to_dict(),
        "parameters": module.num_parameters(),
        **({} if init is None else {"init": init.name}),
        "command": command,
        "data": sources(training, licences or {}),
        "examples": len(training),
        "answer_tokens": sum(len(example.answer_ids) for example in training),
        "data_sha256": digest(training),
        "steps": trainer.done,
        "seconds": round(trainer.seconds, 1),
        ARITHMETIC: str(dtype).removeprefix("torch."),
        "options": {**asdict(recipe.options), "warmup": trainer.warmup},
        "max_tokens": recipe.max_tokens,
        "held_out": {"completions": len(held_out), "before": before, "after": after} if held_out else {},
    }
    _write(folder, module.lora(), record)
    return record


def _write(folder: Path, lora: Lora, record: dict[str, Any]) -> None:
    """Write the folder, the file that says it is finished last."""
    try:
        write_atomically(folder / CARD, _card(record))
        write_atomically(folder / RECORD, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise FileError(f"the LoRA cannot be written to {folder} ({error.strerror}); use another folder") from error
    write_lora(folder, lora, base=record["base"])


def _card(record: Mapping[str, Any]) -> str:
    """Markdown with a model card's front matter."""
    base, terms = record["base"], record["terms"]
    lines = [
        "---",
        "library_name: peft",
        f"base_model: {json.dumps(base)}",
        "---",
        "",
        f"# LoRA for {base}",
        "",
        f"Rank {terms['ranks']}, scale {terms['scales']}, modules {terms['modules']}: {record['parameters']:,} "
        f"parameters in PEFT's format, for the weights with the fingerprint `{record['base_fingerprint']}`.",
        "",
        "```python",
        f'model = anabranch.load({json.dumps(base)}, lora="this folder")',
        "```",
        "",
        "| prompts from | examples | licence |",
        "|---|---:|---|",
    ]
    for part in record["data"]:
        licence = part["licence"] or "not stated"
        lines.append(f"| {part['source'] or 'unnamed'} | {part['examples']:,} | {licence} |")
    if held_out := record["held_out"]:
        lines += ["", f"On {held_out['completions']:,} held-out completions:", ""]
        lines += ["| | before | after |", "|---|---:|---:|"]
        for name in ("loss", "perplexity", "accuracy"):
            lines.append(f"| {name} | {held_out['before'][name]} | {held_out['after'][name]} |")
    if record["command"]:
        lines += ["", "```console", record["command"], "```"]
    return "\n".join(lines) + "\n"
