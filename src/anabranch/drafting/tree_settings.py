"""The settings of methods that draft trees; drafters read the form of their trees from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from anabranch.drafting.grow import product_size
from anabranch.drafting.settings import Settings
from anabranch.errors import InputError
from anabranch.support.nearest import hint

__all__ = ["BUDGETS", "MOST_NODES", "TreeSettings"]

BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # nodes that the tuner tries
MOST_NODES = 1024  # of a tree, since a product tree grows with k ** depth
NODES, ADAPTIVE = 16, 24  # node budget where none is given, and where the size follows the load
S = TypeVar("S", bound="TreeSettings")


@dataclass(frozen=True)
class TreeSettings(Settings):
    """Settings of trees. A method adds others; k, depth, frontier and threshold mean the same everywhere.

    tree       best: the most probable nodes; product: every node has k children; chain; auto: best, with a size that
               follows the load; a kind of the method's own; or a number: best with so many nodes
    nodes      node budget, root included; 0: ``usual``
    k          maximum number of children of a node; 0: ``children``, in a product tree 3
    depth      maximum depth; 0: as deep as the method drafts
    frontier   nodes that are expanded in one round of a best-first tree
    threshold  minimum joint probability of a node

    trees     values of ``tree``
    budgeted  those that have a node budget
    usual     node budgets by ``tree`` where none is given; 16 for others
    children  children of a node at most where k is not given
    """

    trees: ClassVar[tuple[str, ...]] = ("best", "auto")
    budgeted: ClassVar[tuple[str, ...]] = ("best", "auto")
    usual: ClassVar[Mapping[str, int]] = {"auto": ADAPTIVE}
    children: ClassVar[int] = 16
    tree: str = "best"
    nodes: int = 0

    def __post_init__(self) -> None:
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

    @classmethod
    def under_load(cls: type[S]) -> S:
        """``tree=auto``."""
        return cls(tree="auto")

    @property
    def adaptive(self) -> bool:
        """Return whether ``tree=auto``."""
        return self.tree == "auto"

    @property
    def kind(self) -> str:
        """The kind of trees: ``tree``, or best with ``tree=auto``."""
        return "best" if self.tree == "auto" else self.tree

    @property
    def size(self) -> int:
        """The node budget of a tree that has one."""
        return self.nodes or self.usual.get(self.tree, NODES)

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
