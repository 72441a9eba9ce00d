"""Fine-tune a target with LoRA and write a folder in PEFT's format: ``anabranch train lora``.

FOLDER/adapter_config.json, adapter_model.safetensors    the LoRA, written at the end
FOLDER/README.md, training.json                          its card, for people and for programs
FOLDER/training/                                         checkpoint and log; may be deleted afterwards
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.drafting.trained import Trainable
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import Recipe
from anabranch.methods.lora import LoraConfig
from anabranch.methods.terms import fresh_terms, layers_of, lora_of
from anabranch.methods.tuning import QUALITY, TunedObjective
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target, base_name
from anabranch.model.lora import Lora, places
from anabranch.model.peft import read_lora, read_settings, write_lora
from anabranch.support.files import check_folder, write_atomically
from anabranch.train.fit import RunOptions, Subject, fit

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RECORD", "LoraLayers", "check_init", "fresh_lora", "train_lora"]

CARD, RECORD = "README.md", "training.json"


def fresh_lora(model: ModelConfig, config: LoraConfig) -> Lora:
    """Terms that PEFT would begin with: A uniform (Kaiming), B zero. Raises InputError for unknown modules."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in places(model)))
    chosen = ends if config.modules == "all" else [name.strip() for name in config.modules.split(",")]
    if unknown := [name for name in chosen if name not in ends]:
        raise InputError(
            f"a {model.family} model has no linear module {unknown[0]!r}; give some of {', '.join(ends)}, or all"
        )
    return fresh_terms(model, config.rank, config.alpha / config.rank, chosen)


@dataclass(frozen=True)
class LoraShape:
    """The sizes of a LoRA's terms, as a run's checkpoint names them."""

    ranks: str
    scales: str
    modules: str

    @staticmethod
    def of(lora: Lora) -> LoraShape:
        """From the terms."""

        def each(values: Sequence[Any]) -> str:
            return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in sorted(set(values)))

        terms = lora.terms
        ends = [name.rpartition(".")[2] for name in terms]
        return LoraShape(
            each([term.rank for term in terms.values()]), each([term.scale for term in terms.values()]), each(ends)
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))


class LoraLayers(Trainable):
    """The terms of all layers, beginning with those of ``lora``."""

    config: LoraShape

    def __init__(self, model: ModelConfig, lora: Lora) -> None:
        super().__init__()
        self.config, self.model = LoraShape.of(lora), model
        self.layers = layers_of(model, lora)

    def lora(self) -> Lora:
        """The terms as they are now."""
        return lora_of(self.model, self.layers)


def check_init(init: str | Path | None, given: Mapping[str, Any]) -> None:
    """Check a LoRA to start from against the recipe's values that are ``given``, before a model is loaded.

    Raises InputError where it contradicts them, and AdapterError for a folder that is not a LoRA.
    """
    if init is None:
        return
    read_settings(Path(init))
    if fixed := [name for name in ("rank", "alpha", "modules") if name in given]:
        raise InputError(f"--init {init} has its own rank, alpha and modules; leave out --{fixed[0]}")


def train_lora(
    target: Target,
    recipe: Recipe,
    examples: Sequence[Example],
    folder: Path,
    *,
    init: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> dict[str, Any]:
    """Train low-rank terms for ``target`` and write them as a LoRA folder; returns the record (training.json).

    init  LoRA folder in PEFT's format to start from, with its own ranks, scales and modules

    In processes other than the first, the record is {}. Raises CapabilityError for a target that is quantised or has a
    LoRA already, AdapterError for an ``init`` that does not fit it, and what ``fit`` raises.
    """
    if target.lora is not None:
        raise CapabilityError("a LoRA belongs to a model without one; continue the training of a LoRA with --init")

    def make(training: Sequence[Example], frozen: Decoder) -> tuple[LoraLayers, str | None]:
        lora = fresh_lora(target.config, recipe.config) if init is None else read_lora(Path(init), target.config)
        return LoraLayers(target.config, lora).to(target.decoder.device), None if init is None else Path(init).name

    processes = options.get("processes")
    if processes is None or processes.first:
        check_folder(folder, "the LoRA", "folder (--out)")
    subject = Subject("lora", make, _objective, packs=False)
    fitted = fit(target, subject, recipe, examples, folder / "training", **options)
    if fitted is None:
        return {}
    scores = {who: _with_perplexity(score) for who, score in fitted.measured.get(QUALITY, {}).items()}
    count = fitted.training["held_out"]
    record = {
        "base": base_name(target),
        "base_fingerprint": target.fingerprint,
        "terms": fitted.module.config.to_dict(),
        "parameters": fitted.module.num_parameters(),
        **fitted.training,
        "held_out": {"completions": count, "before": scores["untuned"], "after": scores["tuned"]} if count else {},
    }
    _write(folder, fitted.module.lora(), record)
    return record


def _objective(target: Decoder, module: LoraLayers, recipe: Recipe, *, frozen: Decoder) -> TunedObjective:
    return TunedObjective(target, module.layers, frozen=frozen)


def _with_perplexity(score: Mapping[str, float]) -> dict[str, float]:
    return {"loss": score["loss"], "perplexity": round(math.exp(score["loss"]), 4), "accuracy": score["accuracy"]}


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
