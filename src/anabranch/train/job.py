"""Train an adapter from a target, a recipe and examples, and write its folder: ``anabranch train METHOD``.

FOLDER/adapter_config.json, adapter.safetensors, README.md    the adapter, written at the end
FOLDER/training/                                              checkpoint and log; may be deleted afterwards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from anabranch.adapters.folder import TargetIdentity, save_adapter
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import Recipe
from anabranch.methods import Method, methods
from anabranch.model.load import Target
from anabranch.support.appended import settings_path
from anabranch.support.files import check_folder
from anabranch.support.jsonfiles import read_json
from anabranch.train.data import check_first, frequent_tokens, read_examples, read_texts
from anabranch.train.fit import RunOptions, Subject, fit, stored_target
from anabranch.train.start import adopted, begin, start_folder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["check_answers", "check_data", "check_folder_is_free", "read_data", "train_adapter", "trainable"]


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
    target: Target, recipe: Recipe, *, answers: Path | None = None, text: Path | None = None, anybodys: bool = False
) -> list[Example]:
    """The examples of a file of completions or of plain text; give exactly one of them.

    anybodys  take completions that another target wrote, too. What drafts learns its own target's output: then
              FileError is raised where they are known to be another's
    """
    check_data(answers, text)
    max_tokens = min(recipe.max_tokens, target.config.max_positions)
    if text is not None:
        return read_texts(text, target.tokenizer, max_tokens=max_tokens)
    assert answers is not None
    if not anybodys:
        check_answers(answers, target)
    return read_examples(answers, vocab_size=target.config.vocab_size, max_tokens=max_tokens)


def train_adapter(
    target: Target,
    method: Method,
    recipe: Recipe,
    examples: Sequence[Example],
    folder: Path,
    *,
    init: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> dict[str, Any]:
    """Train an adapter for ``method`` and write its folder; returns its record (``adapter_config.json``).

    init  adapter folder of the same target and kind of module to start from, or the name of one that ships,
          "default" for the one that ships for the target, "none" for fresh weights; None: as the recipe says. The
          run takes its shape, but for what was set in the recipe; the draft vocabulary is chosen anew

    In processes other than the first, the record is {}. Raises what ``fit`` raises.
    """
    trained = method.trained
    if trained is None:
        raise CapabilityError(f"the method {method.name!r} has nothing to train; see 'anabranch train --help'")
    start = start_folder(init, recipe, method, target)
    recipe = adopted(recipe, method, start)

    def make(training: Sequence[Example]) -> tuple[TrainedModule, str | None]:
        vocabulary = _vocabulary(target, recipe, training)
        module = trained.make(target.config, recipe.config, vocabulary).to(target.decoder.device)
        if trained.fresh is not None:
            trained.fresh(target.decoder, module, training)
        return module, None if start is None else begin(method, module, start, target)

    processes = options.get("processes")
    if processes is None or processes.first:
        check_folder(folder, "the adapter", "folder (--out)")
    subject = Subject(method.name, make, trained.objective, packed=trained.packed)
    fitted = fit(target, subject, recipe, examples, folder / "training", **options)
    if fitted is None:
        return {}
    module, identity = fitted.module, TargetIdentity.of(target)
    if trained.export is not None:  # a tuned target is written from the stored weights
        made = trained.export(folder / "model", module, stored_target(target))
        if made is not None:
            module, tuned = made
            name, identity = identity.name, TargetIdentity.of(tuned)
            if target.lora is None:  # then the terms are written as a LoRA, too
                identity = replace(identity, name=name, lora="lora")
    return save_adapter(
        folder, module, method=method, target=identity, training=fitted.training, measured=fitted.measured
    )


def _vocabulary(target: Target, recipe: Recipe, training: Sequence[Example]) -> Tensor | None:
    size = recipe.draft_vocabulary
    if not 0 < size < target.config.vocab_size:
        return None
    always = [token for token in (*target.config.eos_token_ids, target.config.bos_token_id) if token is not None]
    return frequent_tokens(training, size, target.config.vocab_size, always)
