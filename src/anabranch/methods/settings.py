"""The settings of a method: a frozen dataclass that is read from text once, at the edge, and printed back to it.

    @dataclass(frozen=True)
    class LookupSettings(Settings):
        tokens: int = 10
        ngram: int = 3

    LookupSettings.parse("tokens=4", "lookup")  ->  LookupSettings(tokens=4)         str(...)  ->  "tokens=4"

Fields are int, float, bool (written yes or no) or text; a field's default is the setting's. ``__post_init__`` of a
subclass refuses values out of range with InputError.
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
    """The base of all settings; by itself that of a method without any."""

    @classmethod
    def parse(cls: type[S], text: str, method: str) -> S:
        """Read ``name=value,name=value``. Raises InputError that names the setting which is wrong."""
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
        """What ``key=value`` is short for."""
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
        """The settings under which the load decides how much is drafted; the defaults where there are no such."""
        return cls()

    def __str__(self) -> str:
        """What ``parse`` reads: the settings that differ from their defaults."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        changed = [
            (name, value) for (name, value), field in zip(given, fields(self), strict=True) if value != field.default
        ]
        return ",".join(f"{name}={_written(value)}" for name, value in changed)

    @property
    def adaptive(self) -> bool:
        """Whether the load decides how many nodes are drafted and verified."""
        return False

    @property
    def budget(self) -> int | None:
        """The most nodes of a tree that is merged from this method's and others'; None: this method does not say."""
        return None


def _written(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
