"""Weights of draft heads as others publish them: a method reads its layouts, ``anabranch convert`` writes adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anabranch.errors import AdapterError
from anabranch.model.decoder import Decoder

__all__ = ["Layout", "Published"]


class Published(Mapping[str, Tensor]):
    """The tensors of a published checkpoint by their names in it, and its config.json.

    source  where it was read from, for messages
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> None:
        self._tensors, self.config, self.source = tensors, config, source
        self._used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self._used.add(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # that of Mapping would count the tensor as used

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def unused(self) -> list[str]:
        """The names of tensors that were not read, sorted."""
        return sorted(set(self._tensors) - self._used)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of a name. Raises AdapterError if it is missing or has another shape."""
        if name not in self:
            raise AdapterError(f"{self.source} has no {name}; its copy is incomplete")
        tensor = self[name]
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"{self.source} has {name} with the shape {tuple(tensor.shape)}, and this target asks for {shape}; "
                "give the target that it was trained for"
            )
        return tensor

    def numbers(self, pattern: str) -> int:
        """Count the numbers in the names that match ``pattern``, whose first group they are: 0, 1, 2, ...

        Raises AdapterError where some are missing.
        """
        matches = (re.fullmatch(pattern, name) for name in self)
        ascending = sorted({int(match[1]) for match in matches if match is not None})
        if ascending != list(range(len(ascending))):
            raise AdapterError(
                f"{self.source} has the heads or blocks {ascending} and lacks some; its copy is incomplete"
            )
        return len(ascending)


@dataclass(frozen=True)
class Layout:
    """A naming scheme of a method's weights in published files.

    name  as its authors call it
    fits  (names of tensors) -> whether they are of this layout
    read  (checkpoint, target) -> the config and the weights of the method's module. Raises AdapterError for one that
          cannot be used with this target
    """

    name: str
    fits: Callable[[Mapping[str, Tensor]], bool]
    read: Callable[[Published, Decoder], tuple[Any, dict[str, Tensor]]]
