"""Initial weights of training: random ones, or those of an adapter, in a folder or shipped with the package."""

from __future__ import annotations

from pathlib import Path

from anabranch.adapters.folder import CONFIG, load_adapter, shipped
from anabranch.adapters.record import method_of, read_record
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import AdapterError, FileError, InputError
from anabranch.learning.recipe import Recipe
from anabranch.methods import Method
from anabranch.model.load import Target

__all__ = ["FRESH", "adopted", "begin", "check_init", "start_folder"]

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
