"""The shape of a trained module: a frozen dataclass whose fields are checked, and stored as JSON with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from anabranch.errors import AdapterError, InputError
from anabranch.support.jsonfiles import is_whole, shown

__all__ = ["MOST_RANK", "MOST_WIDTH", "Shape"]

MOST_RANK = 1024  # of terms that tune a target
MOST_WIDTH = 1 << 16
S = TypeVar("S", bound="Shape")


@dataclass(frozen=True)
class Shape:
    """The base class of shapes. Fields are whole numbers, choices (``Literal``), true or false, or texts.

    ranges  the least and the greatest value of each whole number
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {}

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in (field.name for field in fields(self)):
            hint, value = hints[name], getattr(self, name)
            if get_origin(hint) is Literal and value not in (allowed := get_args(hint)):
                raise InputError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")
            if hint is bool and not isinstance(value, bool):
                raise InputError(f"{name} must be true or false, got {shown(value)}")
            if hint is int and not is_whole(value, *(limits := self.ranges[name])):
                raise InputError(f"{name} must be a whole number from {limits[0]} to {limits[1]}, got {shown(value)}")

    def to_dict(self) -> dict[str, Any]:
        """As stored in adapter_config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[S], record: Any) -> S:
        """From adapter_config.json. Raises AdapterError for unknown or malformed fields."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(record) - known):
            raise AdapterError(
                f"adapter_config.json has the unknown field {shown(unknown[0])}; it may come from a newer anabranch"
            )
        try:
            return cls(**record)
        except (InputError, TypeError) as error:
            raise AdapterError(f"adapter_config.json is malformed: {error}") from error
