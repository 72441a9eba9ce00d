"""Tensors of files: read on access, named and checked.

Only one tensor at a time is read, so that a model is never in memory twice. Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anabranch.errors import AdapterError, FileError, one_line
from anabranch.support.jsonfiles import read_json

__all__ = [
    *("UNREADABLE", "LazyTensors", "SafetensorsDir", "check_trained", "dtype_name", "is_finite"),
    *("load_safetensors_dir", "some_names"),
]

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Errors of safetensors and torch for unreadable files, and for types that torch lacks.
UNREADABLE = (
    *(SafetensorError, OSError, KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError),
    *(OverflowError, EOFError),
)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each made by its loader on every access."""

    def __init__(self, loaders: Mapping[str, Callable[[], Tensor]]) -> None:
        self._loaders = loaders

    def __getitem__(self, name: str) -> Tensor:
        return self._loaders[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._loaders  # Mapping's own loads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


class SafetensorsDir(LazyTensors):
    """The tensors of a folder by name; ``kinds`` are their types, as safetensors names them."""

    def __init__(self, shards: Mapping[str, Path], kinds: Mapping[str, str]) -> None:
        super().__init__({name: partial(_read, path, name) for name, path in shards.items()})
        self.kinds, self.shards = kinds, shards

    @classmethod
    def made(cls, loaders: Mapping[str, Callable[[], Tensor]], kinds: Mapping[str, str]) -> SafetensorsDir:
        """Tensors with loaders of their own."""
        found = cls({}, kinds)
        found._loaders = loaders
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of a file, which is not read."""
        try:
            with safe_open(self.shards[name], framework="pt", device="cpu") as file:
                return tuple(file.get_slice(name).get_shape())
        except UNREADABLE as error:
            raise _broken(self.shards[name], error) from error


def _read(path: Path, name: str) -> Tensor:
    try:
        # opened for each tensor: pages that were read stay resident as long as the file is mapped
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
    except UNREADABLE as error:
        raise _broken(path, error) from error
    return tensor


def _broken(path: Path, error: Exception) -> FileError:
    return FileError(f"{path} is truncated or not a safetensors file ({one_line(error)}); fetch or copy it again")


def load_safetensors_dir(folder: Path) -> SafetensorsDir:
    """The tensors in a folder's ``model.safetensors`` or its shards, read on access. Raises FileError."""
    index = folder / _INDEX
    single = folder / "model.safetensors"
    if single.is_file():
        kinds = _kinds(single)
        return SafetensorsDir(dict.fromkeys(kinds, single), kinds)
    if not index.is_file():
        if any(next(folder.glob(pattern), None) for pattern in _PICKLED):
            raise FileError(
                f"{folder} contains only pickled weights, which can run code when loaded; convert them to safetensors "
                "(with transformers' save_pretrained) or use a repository that has safetensors"
            )
        raise FileError(f"{folder} has neither model.safetensors nor {_INDEX}; give a folder that has one of them")
    listed = read_json(index, "fetch or copy it again").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        raise FileError(f"{index} has no weight_map; fetch or copy it again")
    shards: dict[str, Path] = {}
    kinds = {}
    for shard in sorted(set(listed.values())):
        path = folder / shard
        # a shard must not be outside the folder
        if Path(shard).name != shard or "\0" in shard or not path.is_file():
            raise FileError(f"{folder} lacks the shard {shard!r} that {_INDEX} lists; fetch or copy it again")
        kinds.update(stored := _kinds(path))
        shards.update(dict.fromkeys(stored, path))
    missing = sorted(set(listed) - set(shards))
    if missing:
        raise FileError(
            f"the shards in {folder} lack {some_names(missing)} that {_INDEX} lists; fetch or copy them again"
        )
    return SafetensorsDir(shards, kinds)


def _kinds(path: Path) -> dict[str, str]:
    """The names and types of a file's tensors."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_slice(name).get_dtype() for name in list(file.keys())}
    except UNREADABLE as error:
        raise _broken(path, error) from error


def some_names(names: list[str]) -> str:
    """The first names of tensors and the number of the others, for messages."""
    shown = [name if name.isprintable() and len(name) < 100 else ascii(name)[:100] for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_finite(values: Tensor) -> bool:
    """True if all values are finite. Minimum and maximum propagate NaN, and take a single read."""
    if values.numel() == 0 or not values.is_floating_point():
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_trained(name: str, value: Tensor, where: object, advice: str) -> None:
    """Raise AdapterError unless a trained tensor of the file ``where`` is finite in float32, bfloat16 or float16."""
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise AdapterError(
            f"{where} stores {name} as {dtype_name(value.dtype)}; use weights in float32, bfloat16 or float16"
        )
    if not is_finite(value):
        raise AdapterError(f"{where} has values in {name} that are not finite numbers; {advice}")
