"""Read draft heads that others published, and make adapters of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from anabranch.drafting.published import Layout, Published
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import AdapterError, FileError, InputError, one_line
from anabranch.methods import Method, methods
from anabranch.model.load import Target
from anabranch.model.weights import is_finite
from anabranch.support.jsonfiles import read_json

__all__ = ["Converted", "convert", "read_published"]

PICKLED = (".pt", ".pth", ".bin")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_UNREADABLE = (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, EOFError)


@dataclass(frozen=True)
class Converted:
    """A module made from a published checkpoint, its method, and the type its weights were stored in."""

    module: TrainedModule
    method: Method
    layout: Layout
    dtype: torch.dtype


def read_published(path: Path) -> Published:
    """The tensors of a file, or of all weight files in a folder with its config.json.

    Files in PyTorch's format are read with ``weights_only``, which runs no code; safetensors are preferred.

    Raises FileError for a path without weights, and for a file that is truncated or holds more than tensors.
    """
    if path.is_dir():
        found = sorted(path.glob("*.safetensors")) or sorted(p for p in path.iterdir() if p.suffix in PICKLED)
        if not found:
            raise FileError(f"{path} has no weights; give a folder or a file with .safetensors, .pt or .bin")
        described = path / "config.json"
    else:
        if not path.is_file():
            raise FileError(f"there is no file or folder {path}; download the checkpoint first")
        found, described = [path], path.parent / "config.json"
    tensors: dict[str, Tensor] = {}
    for file in found:
        for name, value in _tensors(file).items():
            if name in tensors:
                raise FileError(f"{path} has {name} in two files; give one of the files")
            tensors[name] = value
    config = read_json(described, "fetch or copy it again") if described.is_file() else {}
    return Published(tensors, config, path.name)


def _tensors(file: Path) -> Mapping[str, Tensor]:
    if file.suffix not in (".safetensors", *PICKLED):
        raise FileError(f"{file} is not a file of weights; give a .safetensors, .pt or .bin file")
    try:
        safe = file.suffix == ".safetensors"
        found: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{file} is truncated, or holds more than tensors, which could run code; give the checkpoint as safetensors"
        ) from error
    except _UNREADABLE as error:
        raise FileError(f"{file} is truncated or not a file of weights ({one_line(error)}); copy it again") from error
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise FileError(f"{file} does not hold tensors by name; give the state dict of the draft heads")
    return dict(found)


def convert(found: Published, target: Target) -> Converted:
    """The module of a published checkpoint, for the target that it was trained for.

    Raises AdapterError where no method reads such a checkpoint, or it does not fit the target.
    """
    known = [(method, layout) for method in methods() if method.trained for layout in method.trained.published]
    chosen = next(((method, layout) for method, layout in known if layout.fits(found)), None)
    if chosen is None:
        names = ", ".join(sorted(found)[:3]) or "nothing"
        raise AdapterError(
            f"{found.source} has the tensors {names}, which are not those of draft heads that are read here: "
            f"{', '.join(layout.name for _, layout in known)}"
        )
    method, layout = chosen
    assert method.trained is not None
    try:
        config, weights = layout.read(found, target.decoder)
        with torch.device("meta"):
            module = method.trained.make(target.config, config, None)
    except InputError as error:
        raise AdapterError(f"{found.source} cannot be used: {error}") from error
    if found.unused:
        raise AdapterError(
            f"{found.source} also has {', '.join(found.unused[:3])}, which {layout.name} heads of this form do not have"
        )
    _check(found, module, weights)
    weights["vocabulary"] = torch.arange(target.config.vocab_size)
    module.load_state_dict(weights, assign=True)
    types = {value.dtype for name, value in weights.items() if name != "vocabulary"}
    return Converted(module, method, layout, types.pop() if len(types) == 1 else torch.float32)


def _check(found: Published, module: TrainedModule, weights: Mapping[str, Tensor]) -> None:
    """Raise AdapterError unless ``weights`` are all those of ``module``, floating point and finite."""
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items() if name != "vocabulary"}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    assert wanted == given, "a layout reads the weights of its module"
    for name, value in weights.items():
        if value.dtype not in _FLOATS:
            kind = str(value.dtype).removeprefix("torch.")
            raise AdapterError(f"{found.source} stores {name} as {kind}; use weights in float32, bfloat16 or float16")
        if not is_finite(value):
            raise AdapterError(f"{found.source} has values in {name} that are not finite numbers; copy it again")
