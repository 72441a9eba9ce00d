"""Tensors of files: read on access, named and checked.

Only one tensor at a time is read, so that a model is never in memory twice. Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anabranch.errors import AdapterError, FileError, one_line
from anabranch.support.jsonfiles import read_json

if TYPE_CHECKING:
    from anabranch.model.matrix import Matrix  # which imports the formats of GGUF files

__all__ = [
    *("UNREADABLE", "Checkpoint", "LazyTensors", "SafetensorsDir", "check_trained", "dtype_name", "is_finite"),
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
    """Tensors by name, each made by its loader on every access; ``kinds`` are their types, as safetensors names them.

    kinds  empty: unknown
    """

    def __init__(
        self, loaders: Mapping[str, Callable[[], Tensor]], kinds: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._loaders, self.kinds = loaders, kinds

    def __getitem__(self, name: str) -> Tensor:
        return self._loaders[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._loaders  # Mapping's own loads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


class SafetensorsDir(LazyTensors):
    """The tensors of a folder by name, and the file of each."""

    def __init__(self, shards: Mapping[str, Path], kinds: Mapping[str, str]) -> None:
        super().__init__({name: partial(_read, path, name) for name, path in shards.items()}, kinds)
        self.shards = shards

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of a file, which is not read."""
        try:
            with safe_open(self.shards[name], framework="pt", device="cpu") as file:
                return tuple(file.get_slice(name).get_shape())
        except UNREADABLE as error:
            raise _broken(self.shards[name], error) from error


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, of any format, as an unquantised Hugging Face checkpoint.

    config     the ``config.json`` record, without a quantisation
    tensors    the parameters by their Hugging Face names, read and dequantised on access
    tokenizer  the transformers tokenizer, of a format that has rules of its own; None: transformers loads the folder's
    dtype      the type to compute in unless a user names one; None: the type of the tensors
    matrices   quantised weights, and those beside them, as the files store them: rows that llama.cpp's converter
               reordered are in ``Matrix.order``, and weights have the layout of ``nn.Linear`` in all families
    files      all files that the matrices come from
    why_not    the reason why a matrix cannot be multiplied as it is stored; empty: none is known yet
    """

    config: Mapping[str, Any]
    tensors: LazyTensors
    tokenizer: Any = None
    dtype: torch.dtype | None = None
    matrices: Mapping[str, Matrix] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    why_not: str = ""


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
