"""Convert draft heads that others published into adapters."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from anabranch.drafting.published import Layout, Published
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import AdapterError, FileError, InputError, one_line
from anabranch.methods import Method, methods
from anabranch.model.load import Target
from anabranch.model.stored import UNREADABLE, check_trained
from anabranch.support.jsonfiles import read_json

__all__ = ["Converted", "convert", "read_published"]

PICKLED = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Converted:
    """A module made from a published checkpoint, its method, and the dtype of the stored weights."""

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
        files = sorted(path.glob("*.safetensors")) or sorted(p for p in path.iterdir() if p.suffix in PICKLED)
        if not files:
            raise FileError(f"{path} has no weights; give a folder or a file with .safetensors, .pt or .bin")
        described = path / "config.json"
    else:
        if not path.is_file():
            raise FileError(f"there is no file or folder {path}; download the checkpoint first")
        files, described = [path], path.parent / "config.json"
    tensors: dict[str, Tensor] = {}
    for file in files:
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
        loaded: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{file} is truncated, or holds more than tensors, which could run code; give the checkpoint as safetensors"
        ) from error
    except UNREADABLE as error:
        raise FileError(f"{file} is truncated or not a file of weights ({one_line(error)}); copy it again") from error
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
    ):
        raise FileError(f"{file} does not hold tensors by name; give the state dict of the draft heads")
    return dict(loaded)


def convert(published: Published, target: Target) -> Converted:
    """Make a module of a published checkpoint, for the target that it was trained for.

    Raises AdapterError if no method reads such a checkpoint, or it does not fit the target.
    """
    known = [(method, layout) for method in methods() if method.trained for layout in method.trained.published]
    chosen = next(((method, layout) for method, layout in known if layout.fits(published)), None)
    if chosen is None:
        names = ", ".join(sorted(published)[:3]) or "nothing"
        raise AdapterError(
            f"{published.source} has the tensors {names}, which are not those of draft heads that are read here: "
            f"{', '.join(layout.name for _, layout in known)}"
        )
    method, layout = chosen
    assert method.trained is not None
    try:
        config, weights = layout.read(published, target.decoder)
        with torch.device("meta"):
            module = method.trained.make(target.config, config, None)
    except InputError as error:
        raise AdapterError(f"{published.source} cannot be used: {error}") from error
    if published.unused:
        raise AdapterError(
            f"{published.source} also has {', '.join(published.unused[:3])}, which {layout.name} heads of this form do "
            "not have"
        )
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items() if name != "vocabulary"}
    assert wanted == {name: tuple(value.shape) for name, value in weights.items()}, "a layout reads all weights"
    for name, value in weights.items():
        check_trained(name, value, published.source, "copy it again")
    weights["vocabulary"] = torch.arange(target.config.vocab_size)
    module.load_state_dict(weights, assign=True)
    types = {value.dtype for name, value in weights.items() if name != "vocabulary"}
    return Converted(module, method, layout, types.pop() if len(types) == 1 else torch.float32)
