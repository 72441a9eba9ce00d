"""Settings of methods: frozen dataclasses that are parsed from text once and printed back to the same text.

    @dataclass(frozen=True)
    class LookupSettings(Settings):
        tokens: int = 10
        ngram: int = 3

    LookupSettings.parse("tokens=4", "lookup")  ->  LookupSettings(tokens=4)         str(...)  ->  "tokens=4"

Fields are int, float, bool (written yes or no) or str. ``__post_init__`` of a subclass raises InputError for values out
of range.

A value in quotes contains any character: ``rest:data="/a+b,nodes=8"``. Without quotes, the value of a path goes on at a
comma that no ``setting=`` follows, and at a plus sign that no method's name follows: ``rest:data=/a+b,c``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from anabranch.drafting.grow import product_size
from anabranch.errors import InputError
from anabranch.support.nearest import hint

__all__ = ["BUDGETS", "MOST_NODES", "Settings", "TreeSettings", "pieces", "quoted", "unquoted"]

S = TypeVar("S", bound="Settings")
_WANTED = {int: "a whole number", float: "a number", bool: "yes or no"}


@dataclass(frozen=True)
class Settings:
    """The base class of settings; used as is by methods without settings.

    paths  names of the fields that hold a path, which may contain commas and plus signs
    least  the least values of numbers
    load   the field with which "auto" lets the number of drafted and verified nodes follow the load; empty: none
    """

    paths: ClassVar[tuple[str, ...]] = ()
    least: ClassVar[tuple[tuple[str, int], ...]] = ()
    load: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, low in self.least:
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def check_count(self, name: str, low: int, high: int | None = None) -> None:
        """Raise InputError if a setting is neither "auto" nor a whole number from ``low`` to ``high``."""
        value: str = getattr(self, name)
        if value != "auto" and not (value.isdigit() and low <= int(value) <= (high or int(value))):
            wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise InputError(f"{name} must be a whole number {wanted}, or auto, got {value!r}")

    @classmethod
    def parse(cls: type[S], text: str, method: str) -> S:
        """Parse ``name=value,name=value``. Raises InputError that names the wrong setting."""
        known = cls._names()
        values: dict[str, Any] = {}
        for item in filter(None, (item.strip() for item in cls._items(text))):
            key, equals, value = item.partition("=")
            if key not in known or not equals:
                allowed = ", ".join(known) or "none"
                raise InputError(
                    f"the drafter {method!r} has no setting {item!r}{hint(key, known)}; settings are {allowed}, as "
                    "name=value"
                )
            key, value = cls.alias(key, value)
            if key in values:
                raise InputError(f"the drafter {method!r} has the setting {key!r} twice; give it once")
            values[key] = cls._read(key, value, method)
        return cls(**values)

    @classmethod
    def _names(cls) -> list[str]:
        """The settings, paths first."""
        return sorted((field.name for field in fields(cls)), key=lambda name: name not in cls.paths)

    @classmethod
    def _items(cls, text: str) -> list[str]:
        known = cls._names()
        return pieces(
            text, ",", lambda before, after: cls._goes_on(before) and after.partition("=")[0].strip() not in known
        )

    @classmethod
    def _goes_on(cls, item: str) -> bool:
        """Return whether ``name=value`` is a path without quotes."""
        key, equals, value = item.partition("=")
        return bool(equals) and key.strip() in cls.paths and value[:1] not in ('"', "'")

    @classmethod
    def ends_in_path(cls, text: str) -> bool:
        """Return whether the last of these settings is a path without quotes."""
        return cls._goes_on(cls._items(text)[-1])

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """The setting that ``key=value`` is short for."""
        return key, value

    @classmethod
    def _read(cls, key: str, value: str, method: str) -> Any:
        kind = get_type_hints(cls)[key]
        if kind is str:
            return unquoted(value, f"the setting {key!r}")
        try:
            return {"yes": True, "no": False}[value] if kind is bool else kind(value)
        except (ValueError, KeyError) as error:
            raise InputError(
                f"the setting {key!r} of the drafter {method!r} must be {_WANTED[kind]}, got {value!r}"
            ) from error

    @classmethod
    def under_load(cls: type[S]) -> S:
        """The settings with which the size of drafts follows the load; the defaults if there are none."""
        return cls(**{cls.load: "auto"}) if cls.load else cls()

    @classmethod
    def in_auto(cls: type[S]) -> S:
        """The settings in "auto": those under load, and what adds to the method (``additions``)."""
        return cls.under_load()

    def __str__(self) -> str:
        """The settings that differ from their defaults, as ``parse`` reads them."""
        defaults = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in self._names()}
        return ",".join(f"{name}={_written(value)}" for name, value in given.items() if value != defaults[name])

    @property
    def adaptive(self) -> bool:
        """Return whether the number of drafted and verified nodes follows the load."""
        return bool(self.load) and getattr(self, self.load) == "auto"

    @property
    def additions(self) -> Mapping[str, Any]:
        """The settings that add to the method what its paper does not have, which candidates of other sizes keep."""
        return {}

    @property
    def budget(self) -> int | None:
        """Maximum number of nodes of a tree merged from this method's and others'; None: no preference."""
        return None


def _written(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else quoted(str(value))


# a backslash escapes in double quotes only, and only a quote or itself
_QUOTED = re.compile(r"""(?<==)(?:"(?:\\.|[^"\\])*"|'[^']*')""")
_SPECIAL = re.compile(r"""[,+"'\s]""")


def pieces(text: str, separator: str, joined: Callable[[str, str], bool] = lambda before, after: False) -> list[str]:
    """Split at separators outside quotes.

    joined  whether a piece continues the text before it, separator included

    >>> pieces('rest:data="/a+b"+suffix', "+")
    ['rest:data="/a+b"', 'suffix']
    """
    masked = _QUOTED.sub(lambda match: "_" * len(match[0]), text)
    parts: list[str] = []
    start = 0
    for piece in masked.split(separator):
        own = text[start : start + len(piece)]
        start += len(piece) + len(separator)
        if parts and joined(parts[-1], own):
            parts[-1] += separator + own
        else:
            parts.append(own)
    return parts


def unquoted(value: str, what: str) -> str:
    """The value without its quotes, if it has any. Raises InputError for a quote that is not closed."""
    if value[:1] not in ('"', "'"):
        return value
    if not _QUOTED.fullmatch(f"={value}", 1):
        raise InputError(f"{what} starts with a quote that does not end it, got {value}; close it at the end")
    return re.sub(r'\\(["\\])', r"\1", value[1:-1]) if value[0] == '"' else value[1:-1]


def quoted(value: str) -> str:
    """The value as ``unquoted`` reads it: in quotes if it has punctuation."""
    if not _SPECIAL.search(value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # nodes that the tuner tries
MOST_NODES = 1024  # of a tree, since a product tree grows with k ** depth
NODES, ADAPTIVE = 16, 24  # node budget where none is given, and where the size follows the load


@dataclass(frozen=True)
class TreeSettings(Settings):
    """Settings of trees. A method adds others; k, depth, frontier and threshold mean the same everywhere.

    tree       best: the most probable nodes; product: every node has k children; chain; auto: best, with a size that
               follows the load; a kind of the method's own; or a number: best with so many nodes
    nodes      node budget, root included; 0: ``default_nodes``
    k          maximum number of children of a node; 0: ``children``, in a product tree 3
    depth      maximum depth; 0: as deep as the method drafts
    frontier   nodes that are expanded in one round of a best-first tree
    threshold  minimum joint probability of a node

    trees     values of ``tree``
    budgeted  those that have a node budget
    default_nodes  node budgets by ``tree`` where none is given; 16 for others
    children  children of a node at most where k is not given
    """

    trees: ClassVar[tuple[str, ...]] = ("best", "auto")
    budgeted: ClassVar[tuple[str, ...]] = ("best", "auto")
    default_nodes: ClassVar[Mapping[str, int]] = {"auto": ADAPTIVE}
    children: ClassVar[int] = 16
    load = "tree"
    tree: str = "best"
    nodes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree not in self.trees:
            raise InputError(
                f"tree must be a number of nodes or one of {', '.join(self.trees)}, got {self.tree!r}"
                f"{hint(self.tree, self.trees)}"
            )
        if self.nodes < 0 or self.nodes == 1:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {self.nodes}")
        if self.nodes > MOST_NODES:
            raise InputError(f"nodes must be at most {MOST_NODES:,}, got {self.nodes}")
        if self.nodes and self.tree not in self.budgeted:
            raise InputError(
                f"nodes is the budget of tree=best, got nodes={self.nodes} with tree={self.tree}; limit the depth or k "
                "there"
            )
        for name, low in (("k", 0), ("depth", 0), ("frontier", 1)):
            value = getattr(self, name, low)
            if isinstance(value, int) and value < low:
                raise InputError(f"{name} must be at least {1 if name == 'k' else low}, got {value}")
        if not 0.0 <= (threshold := getattr(self, "threshold", 0.0)) < 1.0:
            raise InputError(f"threshold must be a probability of at least 0 and below 1, got {threshold}")

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """``tree=32`` is short for ``nodes=32``. Refuses a zero that would stand for the default."""
        if key == "tree" and value.isdigit():
            key = "nodes"
        if key in ("nodes", "k") and value.isdigit() and int(value) == 0:
            least = "2 (the root and one draft)" if key == "nodes" else "1"
            raise InputError(f"{key} must be at least {least}, got {value}")
        return key, value

    @property
    def kind(self) -> str:
        """The kind of trees: ``tree``, or best with ``tree=auto``."""
        return "best" if self.tree == "auto" else self.tree

    @property
    def size(self) -> int:
        """The node budget of a tree that has one."""
        return self.nodes or self.default_nodes.get(self.tree, NODES)

    @property
    def budget(self) -> int | None:
        """The node budget; None for trees without one."""
        return self.size if self.tree in self.budgeted else None

    @property
    def widths(self) -> tuple[int, ...]:
        """Children of a node at most by its depth, the last entry for all that follow."""
        if self.kind == "chain":
            return (1,)
        return (getattr(self, "k", 0) or (3 if self.kind == "product" else self.children),)

    @property
    def floor(self) -> float:
        """Minimum joint log probability of a node."""
        threshold: float = getattr(self, "threshold", 0.0)
        return math.log(threshold) if threshold else -math.inf

    def depth_for(self, known: int, unit: str) -> int:
        """Number of a module's ``known`` heads or streams (``unit``) that trees use. Raises InputError for too many."""
        depth: int = getattr(self, "depth", 0)
        if depth > known:
            raise InputError(f"depth is {depth}, but the adapter has only {known} {unit}; lower depth")
        depth = depth or known
        if self.kind == "product" and product_size(self.widths, depth) > MOST_NODES:
            raise InputError(
                f"a product tree of {self.widths[0]} children over {depth} {unit} has more than {MOST_NODES:,} nodes; "
                "lower k or depth, or use tree=best with a node budget"
            )
        return depth

    def size_for(self, depth: int) -> int:
        """The most nodes of a tree of a depth."""
        return self.size if self.tree in self.budgeted else product_size(self.widths, depth)
