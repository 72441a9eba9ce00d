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

from anabranch.adapters.folder import CONFIG, TargetIdentity, load_adapter, save_adapter, shipped
from anabranch.adapters.record import method_of, read_record
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import AdapterError, CapabilityError, FileError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import Recipe
from anabranch.methods import Method, methods
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import begun
from anabranch.model.load import Target
from anabranch.support.appended import settings_path
from anabranch.support.files import check_folder
from anabranch.support.jsonfiles import read_json
from anabranch.train.data import Sourced, check_first, frequent_tokens, read_examples, read_texts
from anabranch.train.fit import RunOptions, Subject, fit
from anabranch.train.sounds import WindowReader

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "FRESH",
    "adopted",
    "begin",
    "check_answers",
    "check_data",
    "check_folder_is_free",
    "check_init",
    "check_trains",
    "read_data",
    "start_folder",
    "train_adapter",
    "trainable",
]

FRESH = "none"  # start from fresh weights
FITTING = ("default", "shipped")  # start from the adapter that ships for the target


def check_init(init: str | Path | None) -> None:
    """Check a folder or name to start from, before a model is loaded. Raises FileError."""
    if init is None or str(init) in (FRESH, *FITTING) or _named(init) is not None:
        return
    if not (Path(init) / CONFIG).is_file():
        names = ", ".join((FRESH, FITTING[0], *(path.name for path in shipped())))
        raise FileError(f"--init {init} contains no adapter (no {CONFIG}); give an adapter folder, or one of {names}")


def _named(init: str | Path) -> Path | None:
    """The shipped adapter of this name, if there is one and no such folder."""
    return next((path for path in shipped() if path.name == str(init) and not Path(init).exists()), None)


def start_folder(init: str | Path | None, recipe: Recipe, method: Method, target: Target) -> Path | None:
    """The adapter folder that a training starts from; None: fresh weights.

    init  a folder, the name of a shipped adapter, "default" for the one that ships for the target, "none"; None: what
          the recipe says

    Raises AdapterError where no adapter of the method ships for the target, and one is required.
    """
    if (init is None and not recipe.init) or str(init) == FRESH:
        return None
    if init is not None and (str(init) not in FITTING or (Path(init) / CONFIG).is_file()):
        return _named(init) or Path(init)
    for path in shipped():
        record = read_record(path)
        if (record["method"], record["target"]["fingerprint"]) == (method.name, target.fingerprint):
            return path
    if init is None:
        return None
    raise AdapterError(
        f"no adapter for the method {method.name!r} ships for {target.title}, so --init {init} has none to start from; "
        f"leave it out, or give a folder"
    )


def adopted(recipe: Recipe, method: Method, folder: Path | None) -> Recipe:
    """The recipe with the shape of the adapter in ``folder``, but for what the user has set.

    Raises AdapterError for a folder that cannot be read, InputError for an adapter of another method.
    """
    if folder is None:
        return recipe
    record = read_record(folder)
    theirs, mine = method_of(record)[1], method.trained
    assert mine is not None
    if theirs.module is not mine.module:
        raise InputError(
            f"the adapter in {folder} is for the method {record['method']!r}, not {method.name!r}; start from an "
            "adapter of that method"
        )
    return mine.adopt(recipe, mine.config.from_dict(record["config"]))


def begin(method: Method, module: TrainedModule, folder: Path, target: Target) -> str:
    """Copy the weights of an adapter folder into ``module``; returns the SHA-256 in the folder's record.

    Raises AdapterError for the adapter of another target, InputError for one of another shape.
    """
    assert method.trained is not None
    loaded = load_adapter(folder, target)
    try:
        method.trained.begin(module, loaded.module)
    except InputError as error:
        raise InputError(f"training cannot start from the adapter in {folder}: {error}") from error
    return str(loaded.record["sha256"])


def check_trains(target: Target, method: Method) -> None:
    """Raise CapabilityError for a method that drafts for no target of this kind."""
    if target.config.encoder is not None and not method.with_source:
        able = ", ".join(each.name for each in methods() if each.trained is not None and each.with_source)
        raise CapabilityError(
            f"{method.name} does not draft for encoder-decoder models such as {target.title}; train one of {able}"
        )


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
        target.check_decoder_only("training on plain text (--text)")
        return read_texts(text, target.tokenizer, max_tokens=max_tokens)
    assert answers is not None
    if not anybodys:
        check_answers(answers, target)
    words = target.config.vocab_size
    return read_examples(answers, vocab_size=words, max_tokens=max_tokens, sourced=_sourced(target))


def _sourced(target: Target) -> Sourced:
    """Take rows of completions for a target: of an encoder-decoder model, prompts are texts that the encoder reads."""
    encoder = target.config.encoder
    if encoder is None or not encoder.channels:
        return lambda record, prompt, where: begun(target.config, prompt)
    reader = WindowReader(target)
    return lambda record, prompt, where: (prompt, reader.source(record, where))


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
    check_trains(target, method)
    start = start_folder(init, recipe, method, target)
    recipe = adopted(recipe, method, start)

    def make(training: Sequence[Example], frozen: Decoder) -> tuple[TrainedModule, str | None]:
        vocabulary = _vocabulary(target, recipe, training)
        module = trained.make(target.config, recipe.config, vocabulary).to(target.decoder.device)
        if trained.fresh is not None:
            trained.fresh(target.decoder, module, training, frozen)
        return module, None if start is None else begin(method, module, start, target)

    processes = options.get("processes")
    if processes is None or processes.first:
        check_folder(folder, "the adapter", "folder (--out)")
    subject = Subject(method.name, make, trained.learn, packed=trained.packed)
    fitted = fit(target, subject, recipe, examples, folder / "training", **options)
    if fitted is None:
        return {}
    module, identity = fitted.module, TargetIdentity.of(target)
    if trained.export is not None:
        made = trained.export(folder / "model", module, target)
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
