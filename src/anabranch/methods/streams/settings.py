"""The settings of trees that are drafted from streams, shared by the methods that do so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from anabranch.drafting.settings import Settings
from anabranch.errors import InputError
from anabranch.methods.streams.draft import DraftOptions

__all__ = ["TreeSettings"]

S = TypeVar("S", bound="TreeSettings")
TREES = ("best", "product", "chain", "auto")
MOST = 24  # default node budget if the size of trees follows the load


@dataclass(frozen=True)
class TreeSettings(Settings):
    """The shape of trees.

    tree       best, product, chain, auto (best, sized by the load), or a number: best with so many nodes
    nodes      node budget, counting the root; 0: 16, or with tree=auto 24
    k          maximum number of children of a node; 0: 16, or in a product tree 3
    depth      number of streams or masks used; 0: all, but fewer in small best-first trees
    frontier   maximum number of nodes expanded per level (best-first)
    threshold  minimum joint probability of a node (best-first)
    """

    tree: str = "best"
    nodes: int = 0
    k: int = 0
    depth: int = 0
    frontier: int = 12
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise InputError(f"tree must be a number of nodes or one of {', '.join(TREES)}, got {self.tree!r}")
        if self.nodes < 0 or self.nodes == 1:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {self.nodes}")
        if self.k < 0:
            raise InputError(f"k must be at least 1, got {self.k}")
        _ = self.options

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """``tree=32`` is short for ``nodes=32``."""
        if key == "tree" and value.isdigit():
            if int(value) < 2:
                raise InputError(f"nodes must be at least 2 (the root and one draft), got {value}")
            return "nodes", value
        if key in ("nodes", "k") and value.isdigit() and int(value) == 0:
            raise InputError(f"{key} must be at least {2 if key == 'nodes' else 1}, got {value}")
        return key, value

    @classmethod
    def under_load(cls: type[S]) -> S:
        """``tree=auto``."""
        return cls(tree="auto")

    @property
    def adaptive(self) -> bool:
        """Whether ``tree=auto``."""
        return self.tree == "auto"

    @property
    def budget(self) -> int:
        """The maximum number of nodes of a tree."""
        return self.options.nodes

    @property
    def options(self) -> DraftOptions:
        """The options that turn stream states into a tree."""
        nodes = self.nodes or (MOST if self.adaptive else 16)
        k = self.k or (3 if self.tree == "product" else 16)
        tree: Any = "best" if self.adaptive else self.tree
        return DraftOptions(tree, nodes, k, self.depth, self.frontier, self.threshold)
