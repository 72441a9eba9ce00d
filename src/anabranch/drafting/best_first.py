"""Best-first growth: the most probable nodes of an implicit tree under a node budget.

A child is no more probable than its parent, so taking the most probable candidate again and again finds the ``nodes``
most probable nodes, and each one's parent before it. Children are asked for only when their parent was taken, and the
next sibling waits until the one before it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from anabranch.tree import DraftTree

__all__ = ["best_first"]

State = TypeVar("State")


def best_first(
    root: int,
    state: State,
    children: Callable[[State], Sequence[tuple[int, float, State]]],
    *,
    nodes: int,
    depth: int,
    source: str | Sequence[str],
) -> DraftTree:
    """The tree of the ``nodes`` most probable nodes, the root included, at most ``depth`` deep.

    state     of the root; of any other node it is what ``children`` returned with it
    children  of a state: token, log probability given the parent (at most 0) and state, most probable first
    source    label of the nodes, or one for each depth from 1 on

    Where siblings are equally probable the earlier one is taken first.
    """
    tokens, parents, joint, depths = [root], [-1], [0.0], [0]
    waiting: list[tuple[float, int, int, Sequence[tuple[int, float, State]], int]] = []
    pushed = 0

    def push(parent: int, siblings: Sequence[tuple[int, float, State]], place: int) -> None:
        nonlocal pushed
        if place < len(siblings):
            heapq.heappush(waiting, (-joint[parent] - siblings[place][1], pushed, parent, siblings, place))
            pushed += 1

    if nodes > 1 and depth > 0:
        push(0, children(state), 0)
    while waiting and len(tokens) < nodes:
        cost, _, parent, siblings, place = heapq.heappop(waiting)
        token, _, here = siblings[place]
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        joint.append(-cost)
        depths.append(depths[parent] + 1)
        push(parent, siblings, place + 1)
        if depths[node] < depth and len(tokens) < nodes:
            push(node, children(here), 0)
    return DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        sources=("target", *(source if isinstance(source, str) else source[d - 1] for d in depths[1:])),
        log_probs=np.array(joint, np.float32),
    )
