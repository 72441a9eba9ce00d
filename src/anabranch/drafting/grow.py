"""The growth of draft trees: best-first, product, chain, ranked and sampled ones.

A method says what may follow some nodes (``expand``); ``grow`` chooses the nodes to ask about, and which are kept.

    nodes=4, frontier=1                                asked      tree so far, by probability
    expand([9])   -> 1 (0.6), 2 (0.3)                  9          9, 1, 2
    expand([1])   -> 3 (0.8), 4 (0.1)                  1          9, 1, 3 (0.48), 2 (0.3)
    expand([3])   -> 5 (0.5)                           3          9, 1, 3, 2; 5 has 0.24

Since a child is no more probable than its parent, the most probable nodes form a tree, and a node is asked about only
once it is among them. Ties: of equally probable nodes the one that was proposed first ranks first, hence the shallower
one of a path, and of siblings the one that the method named first. Nodes stand in the tree in this order of rank.

The same rule in tensors, for methods whose levels are products on a device: ``grow_tensors``; in C++ for streams:
``methods/streams/draft.h``. Tests hold both to this one.

V vocabulary of the target.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.sampling import inverse_cdf
from anabranch.tree import DraftTree

__all__ = ["Child", "Form", "Growth", "Node", "Source", "by_depth", "grow", "product_size"]

Child: TypeAlias = "tuple[int, float, Any]"  # a token, its log probability given the path to it, and a state of its own
Source: TypeAlias = "Callable[[Node], str]"
Ranks: TypeAlias = "dict[tuple[int, ...], int]"


class Noise(Protocol):
    """A source of uniform random numbers, such as ``np.random.Generator``."""

    def random(self, size: int, /) -> NDArray[np.float64]:
        """The next ``size`` numbers."""


@dataclass(frozen=True)
class Form:
    """The form of a tree.

    nodes        node budget, root included; a sampled tree has all of its nodes
    depth        tokens of a path at most
    widths       children of a node at most: by its depth, the last entry for all that follow; or of a ranked tree by
                 its path of ranks, () for the root: {(): 2, (0,): 1} is a root with two children and a grandchild below
                 the more probable one
    floor        minimum joint log probability of a node; sampled nodes of a lower one stay, but get no children
    frontier     nodes that are asked about in one round
    rounds       rounds at most; None: until the tree is complete
    by_level     ask about the nodes of one level after the other
    noise        for sampled trees, whose children are drawn from distributions
    replacement  whether sampled siblings are independent of each other
    """

    nodes: int
    depth: int
    widths: Sequence[int] | Ranks = (2**31,)
    floor: float = -math.inf
    frontier: int = 1
    rounds: int | None = None
    by_level: bool = False
    noise: Noise | None = None
    replacement: bool = True

    def width(self, node: Node) -> int:
        """The number of children of a node at most."""
        if node.depth >= self.depth:
            return 0
        if isinstance(self.widths, dict):
            return self.widths.get(node.ranks, 0)
        return _at(self.widths, node.depth)

    @property
    def chain(self) -> bool:
        """Return whether no node has more than one child."""
        return not isinstance(self.widths, dict) and max(self.widths) == 1


class Node:
    """A node of a tree that grows: its token, parent, depth, joint log probability, and the method's own state of it.

    number  in the order in which nodes were proposed
    width   children at most
    rank    among its siblings
    """

    __slots__ = ("depth", "expanded", "growth", "joint", "number", "parent", "rank", "state", "token", "width")

    def __init__(
        self, growth: Growth, token: int, parent: Node | None, rank: int, joint: float, number: int, state: Any
    ) -> None:
        self.growth, self.token, self.parent, self.rank = growth, token, parent, rank
        self.joint, self.number, self.state, self.expanded = joint, number, state, False
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.width = growth.form.width(self)

    @property
    def path(self) -> list[int]:
        """The tokens from below the root to this node."""
        return [] if self.parent is None else [*self.parent.path, self.token]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its path of ranks; empty for the root."""
        return () if self.parent is None else (*self.parent.ranks, self.rank)


class Growth:
    """A tree that grows.

    state  the method's state of the root
    key    whatever else ``expand`` needs to know of the row
    """

    def __init__(self, root: int, form: Form, *, state: Any = None, key: Any = None) -> None:
        self.form, self.key = form, key
        self.root = Node(self, root, None, 0, 0.0, 0, state)
        self._nodes = 1  # proposed so far
        self._rounds = 0
        # the nodes that are kept, by rank; all before ``_first`` were asked about
        self._ranked: list[tuple[float, int, Node]] = [(0.0, 0, self.root)]
        self._first = 0
        self._level = [self.root]  # of a sampled tree, the deepest
        self._distributions: dict[int, Tensor] = {}  # that the children of a node were drawn from

    def wanted(self) -> list[Node]:
        """The nodes to ask about in the next round; none if the tree is complete."""
        form, ranked = self.form, self._ranked
        if self._rounds == form.rounds:
            return []
        self._rounds += 1
        if form.noise is not None:
            level, self._level = self._level, []
            return [node for node in level if node.joint >= form.floor and node.width]
        nodes: list[Node] = []
        for place in range(self._first, min(len(ranked), form.nodes - 1)):  # the last of the best nodes has no child
            node = ranked[place][2]
            if node.expanded or not node.width:
                self._first += place == self._first
            elif not form.by_level or node.depth == self._rounds - 1:
                nodes.append(node)
                if len(nodes) == form.frontier:
                    break
        return nodes

    def add(self, node: Node, answer: Sequence[Child] | Tensor) -> None:
        """Take the children of a node, best first, or the distribution [V] that they are drawn from."""
        node.expanded = True
        if self.form.noise is not None:
            if isinstance(answer, Tensor):
                self._draw(node, answer, self.form.noise)
            return
        assert not isinstance(answer, Tensor), "only sampled trees are given distributions"
        most, floor, ranked = self.form.nodes, self.form.floor, self._ranked
        for rank, (token, log_prob, state) in enumerate(answer[: node.width]):
            joint = node.joint + log_prob
            if joint < floor or (len(ranked) >= most and -joint >= ranked[-1][0]):
                break
            place = bisect(ranked, (-joint, self._nodes))
            ranked.insert(place, (-joint, self._nodes, Node(self, token, node, rank, joint, self._nodes, state)))
            self._first = min(self._first, place)
            self._nodes += 1
            if len(ranked) > most:
                ranked.pop()

    def _draw(self, node: Node, q_V: Tensor, noise: Noise) -> None:
        self._distributions[node.number] = q_V
        for token in _drawn(q_V, node.width, noise, replacement=self.form.replacement):
            joint = node.joint + math.log(float(q_V[token]))
            child = Node(self, token, node, 0, joint, self._nodes, None)
            self._ranked.append((0.0, self._nodes, child))
            self._level.append(child)
            self._nodes += 1

    def tree(self, source: Source) -> DraftTree:
        """The tree as it is now; ``source`` labels its nodes."""
        nodes = [node for _, _, node in self._ranked]
        place = {node.number: i for i, node in enumerate(nodes)}
        parents = [-1 if node.parent is None else place[node.parent.number] for node in nodes]
        arrays = np.array([node.token for node in nodes], np.int64), np.array(parents, np.int64)
        sources = ("target", *[source(node) for node in nodes[1:]])
        log_probs = np.array([node.joint for node in nodes], np.float32)
        if not self._distributions:
            return DraftTree.unchecked(*arrays, sources, log_probs)
        last, none = max(self._distributions), torch.zeros_like(next(iter(self._distributions.values())))
        probs = torch.stack([self._distributions.get(number, none) for number in range(last + 1)])
        replacement = self.form.replacement
        return DraftTree(*arrays, draft_probs=probs, replacement=replacement, sources=sources, log_probs=log_probs)


def grow(
    growths: Sequence[Growth],
    expand: Callable[[list[Node]], Iterable[Sequence[Child] | Tensor | None]],
    source: Source,
) -> list[DraftTree]:
    """Grow trees together.

    expand  nodes of any of the trees -> for each, the tokens that may follow it with their log probabilities, best
            first; in sampled trees the distribution [V], or () where there is none. None: ask again in the next round.
            Trees whose nodes are all answered go on meanwhile
    source  labels a node
    """
    wanted = [node for growth in growths for node in growth.wanted()]
    while wanted:
        left: list[Node] = []
        for node, answer in zip(wanted, expand(wanted), strict=True):
            if answer is None:
                left.append(node)
            else:
                node.growth.add(node, answer)
        waiting = {id(node.growth) for node in left}
        wanted = left + [node for growth in growths if id(growth) not in waiting for node in growth.wanted()]
    return [growth.tree(source) for growth in growths]


def by_depth(label: str) -> Source:
    """Sources "LABEL 1", "LABEL 2", ... by depth."""
    return lambda node: f"{label} {node.depth}"


def product_size(widths: Sequence[int], depth: int) -> int:
    """Nodes of the tree in which each node at depth d has ``widths[d]`` children, root included.

    >>> product_size((2, 1), 3)
    7
    """
    size, level = 1, 1
    for d in range(depth):
        level *= _at(widths, d)
        size += level
    return size


def _at(widths: Sequence[int], depth: int) -> int:
    return widths[min(depth, len(widths) - 1)]


def _drawn(q_V: Tensor, count: int, noise: Noise, *, replacement: bool) -> list[int]:
    """Up to ``count`` tokens drawn from a distribution; without replacement no more than have a probability."""
    if replacement:
        return inverse_cdf(q_V.expand(count, -1), noise.random(count)).tolist()
    rest_V, tokens = q_V.clone(), list[int]()
    for uniform in noise.random(min(count, int((q_V > 0).sum()))):
        tokens.append(int(inverse_cdf(rest_V[None], [uniform])))
        rest_V[tokens[-1]] = 0.0
    return tokens
