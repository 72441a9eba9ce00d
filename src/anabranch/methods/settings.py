"""The settings of a method: a frozen dataclass that is parsed from text once and printed back to the same text.

    @dataclass(frozen=True)
    class LookupSettings(Settings):
        tokens: int = 10
        ngram: int = 3

    LookupSettings.parse("tokens=4", "lookup")  ->  LookupSettings(tokens=4)         str(...)  ->  "tokens=4"

Fields are int, float, bool (written yes or no) or str. ``__post_init__`` of a subclass raises InputError for values out
of range.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

from anabranch.errors import InputError

__all__ = ["Settings"]

S = TypeVar("S", bound="Settings")
_WANTED = {int: "a whole number", float: "a number", bool: "yes or no"}


@dataclass(frozen=True)
class Settings:
    """The base class of settings; used as is by methods without settings."""

    @classmethod
    def parse(cls: type[S], text: str, method: str) -> S:
        """Parse ``name=value,name=value``. Raises InputError that names the wrong setting."""
        known = [field.name for field in fields(cls)]
        found: dict[str, Any] = {}
        for item in filter(None, (item.strip() for item in text.split(","))):
            key, equals, value = item.partition("=")
            if key not in known or not equals:
                allowed = ", ".join(known) or "none"
                raise InputError(
                    f"the drafter {method!r} has no setting {item!r}; settings are {allowed}, as name=value"
                )
            key, value = cls.alias(key, value)
            if key in found:
                raise InputError(f"the drafter {method!r} has the setting {key!r} twice; give it once")
            found[key] = cls._read(key, value, method)
        return cls(**found)

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """The setting that ``key=value`` is short for."""
        return key, value

    @classmethod
    def _read(cls, key: str, value: str, method: str) -> Any:
        hint = get_type_hints(cls)[key]
        try:
            if hint is bool:
                return {"yes": True, "no": False}[value]
            return hint(value) if hint in (int, float) else value
        except (ValueError, KeyError) as error:
            raise InputError(
                f"the setting {key!r} of the drafter {method!r} must be {_WANTED[hint]}, got {value!r}"
            ) from error

    @classmethod
    def under_load(cls: type[S]) -> S:
        """The settings with which the size of drafts follows the load; the defaults if there are none."""
        return cls()

    def __str__(self) -> str:
        """The settings that differ from their defaults, as ``parse`` reads them."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        changed = [
            (name, value) for (name, value), field in zip(given, fields(self), strict=True) if value != field.default
        ]
        return ",".join(f"{name}={_written(value)}" for name, value in changed)

    @property
    def adaptive(self) -> bool:
        """Whether the number of drafted and verified nodes follows the load."""
        return False

    @property
    def budget(self) -> int | None:
        """Maximum number of nodes of a tree merged from this method's and others'; None: no preference."""
        return None


def _written(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
