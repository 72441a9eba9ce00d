"""The shape of trees from draft heads, and the settings that name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from anabranch.drafting.settings import Settings
from anabranch.errors import InputError

__all__ = ["BUDGETS", "HeadSettings", "TreeShape"]

MOST = 24  # nodes of a tree whose size follows the load, unless ``nodes`` says otherwise
MOST_NODES = 1024  # of a product tree, which grows with k ** heads
BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
S = TypeVar("S", bound="HeadSettings")


@dataclass(frozen=True)
class TreeShape:
    """The shape of the trees.

    tree   "best": the ``nodes`` most probable nodes; "sparse": ``nodes`` nodes at fixed places (the head's best, second
           best, ... token), whatever their probabilities (the paper); "product": every node has ``k`` children; "chain"
    nodes  of a best-first or sparse tree at most, root included
    k      children of a node at most
    depth  heads that are used; 0: all
    """

    tree: Literal["best", "chain", "sparse", "product"] = "best"
    nodes: int = 16
    k: int = 10
    depth: int = 0

    def __post_init__(self) -> None:
        if self.tree not in ("best", "chain", "sparse", "product"):
            raise InputError(f"tree must be best, chain, sparse or product, got {self.tree!r}")
        for name, low in (("nodes", 2), ("k", 1), ("depth", 0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def heads(self, known: int) -> int:
        """How many of a module's ``known`` heads are used. Raises InputError for more than it has."""
        if self.depth > known:
            raise InputError(f"depth is {self.depth}, but the adapter has only {known} heads; lower depth")
        depth = self.depth or known
        if self.tree == "product" and sum(self.k**d for d in range(depth + 1)) > MOST_NODES:
            raise InputError(
                f"a product tree of {self.k} children over {depth} heads has more than {MOST_NODES:,} nodes; lower k "
                "or depth, or use tree=best with a node budget"
            )
        return depth

    def size(self, known: int) -> int:
        """The most nodes of a tree from a module of ``known`` heads, root included."""
        depth = self.heads(known)
        if self.tree in ("best", "sparse"):
            return self.nodes
        return sum((1 if self.tree == "chain" else self.k) ** d for d in range(depth + 1))


@dataclass(frozen=True)
class HeadSettings(Settings):
    """Settings of methods with draft heads; see ``TreeShape``.

    tree   best, chain, sparse, product, auto (best, with a size that follows the load), or a number: best with so many
           nodes
    nodes  node budget, counting the root; 0: 16, or with tree=auto 24
    k      maximum number of children of a node; 0: 10, or in a product tree 3
    depth  number of heads used; 0: all
    """

    trees: ClassVar[tuple[str, ...]] = ("best", "chain", "sparse", "product", "auto")
    tree: str = "best"
    nodes: int = 0
    k: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        if self.tree not in self.trees:
            raise InputError(f"tree must be a number of nodes or one of {', '.join(self.trees)}, got {self.tree!r}")
        if self.nodes < 0 or self.nodes == 1:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {self.nodes}")
        if self.nodes and self.tree in ("chain", "product"):
            raise InputError(f"a tree with tree={self.tree} has no node budget, got nodes={self.nodes}; use depth or k")
        if self.k < 0:
            raise InputError(f"k must be at least 1, got {self.k}")
        _ = self.shape

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """``tree=32`` is short for ``nodes=32``. Refuses a zero that would stand for the default."""
        if key == "tree" and value.isdigit():
            key = "nodes"
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
    def budget(self) -> int | None:
        """The maximum number of nodes of a tree that has a node budget."""
        return self.shape.nodes if self.shape.tree in ("best", "sparse") else None

    @property
    def shape(self) -> TreeShape:
        """The shape of the trees."""
        tree: Any = "best" if self.adaptive else self.tree
        nodes = self.nodes or (MOST if self.adaptive else 16)
        return TreeShape(tree, nodes, self.k or (3 if tree == "product" else 10), self.depth)
