"""How draft trees grow from a draft model's distributions.

A growth is a generator: it yields the nodes of its ``Continuations`` whose next tokens it has to know, is resumed when
they are in ``found``, and returns the tree. So one forward pass of the draft model serves all rows of a batch, and a
node that an inner drafter guessed costs no pass of its own.

    growth = best_first(asked, ...)
    nodes = next(growth)                 [0]: what follows the root?
    asked.found[0] = [(5, -0.2), (7, -1.9)]
    nodes = next(growth)                 [1]: and what follows 5?

n nodes, V vocabulary of the target.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from anabranch.drafting.reader import Continuations
from anabranch.sampling import inverse_cdf
from anabranch.tree import DraftTree

__all__ = ["Growth", "best_first", "product_size", "ranked", "sampled"]

Growth = Generator[Sequence[int], None, DraftTree]


def best_first(
    asked: Continuations,
    *,
    widths: Sequence[int],
    depth: int,
    nodes: int,
    frontier: int,
    floor: float,
    chain: bool,
    label: str = "draft",
) -> Growth:
    """The ``nodes`` most probable nodes, root included, at most ``depth`` deep.

    ``asked.found`` has the best next tokens of a node and their log probabilities [(token, log p), ...], best first. A
    node is asked about once it is among the most probable ones so far and a child of it could be; of these, the
    ``frontier`` most probable ones in one round. There are at most ``depth`` rounds.

    widths  children of a node by its depth; the last entry stands for all that follow
    floor   least joint log probability of a node
    chain   the tree is a chain (widths of 1)
    label   sources are "LABEL 1", "LABEL 2", ... by depth
    """
    tokens, parents, depths, joint, at = [asked.tokens[0]], [-1], [0], [0.0], [0]
    unasked, best = {0}, [0]
    for _ in range(depth):
        # the last of the best nodes has no child among them
        chosen = [n for n in best[: nodes - 1] if n in unasked and depths[n] < depth][:frontier]
        if not chosen:
            break
        if needed := [at[n] for n in chosen if at[n] not in asked.found]:
            yield needed
        for n in chosen:
            unasked.remove(n)
            for token, log_prob in asked.found[at[n]][: _at(widths, depths[n])]:
                if joint[n] + log_prob < floor:
                    break
                unasked.add(len(tokens))
                at.append(asked.child(at[n], token))
                tokens.append(token)
                parents.append(n)
                depths.append(depths[n] + 1)
                joint.append(joint[n] + log_prob)
                if chain:
                    asked.chain.append(at[-1])
        best = _most_probable(joint, nodes)
    return _best(tokens, parents, _sources(depths, label), joint, nodes)


def ranked(
    asked: Continuations,
    *,
    ranks: Sequence[tuple[int, ...]],
    depth: int,
    nodes: int,
    floor: float,
    label: str = "draft",
) -> Growth:
    """A tree of a given form, at most ``depth`` deep, or its ``nodes`` most probable nodes, root included.

    ranks  the nodes as paths of ranks, each after its parent: (0, 2) is the third best child of the best child. Nodes
           whose joint log probability is below ``floor`` are left out
    label  sources are "LABEL 1", "LABEL 2", ... by depth
    """
    tokens, parents, depths, joint, at = [asked.tokens[0]], [-1], [0], [0.0], [0]
    place: dict[tuple[int, ...], int] = {(): 0}
    for d in range(1, depth + 1):
        level = [path for path in ranks if len(path) == d and path[:-1] in place]
        if needed := list(dict.fromkeys(n for path in level if (n := at[place[path[:-1]]]) not in asked.found)):
            yield needed
        for path in level:
            above = place[path[:-1]]
            children = asked.found[at[above]]
            if path[-1] >= len(children) or joint[above] + children[path[-1]][1] < floor:
                continue
            token, log_prob = children[path[-1]]
            place[path] = len(tokens)
            at.append(asked.child(at[above], token))
            tokens.append(token)
            parents.append(above)
            depths.append(d)
            joint.append(joint[above] + log_prob)
    return _best(tokens, parents, _sources(depths, label), joint, nodes)


def _best(
    tokens: Sequence[int], parents: Sequence[int], sources: tuple[str, ...], joint: Sequence[float], nodes: int
) -> DraftTree:
    """The tree of the ``nodes`` most probable of some nodes, each of which comes after its parent."""
    whole = DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        sources=sources,
        log_probs=np.array(joint, np.float32),
    )
    best = _most_probable(joint, nodes)
    return whole if len(best) == len(tokens) else whole.select(sorted(best))


def _most_probable(joint: Sequence[float], count: int) -> list[int]:
    # stable: of equals the earlier one first, so that no node is kept without its parent
    return sorted(range(len(joint)), key=joint.__getitem__, reverse=True)[:count]


def sampled(
    asked: Continuations,
    *,
    widths: Sequence[int],
    depth: int,
    floor: float,
    replacement: bool,
    noise: np.random.Generator,
    label: str = "draft",
) -> Growth:
    """A tree whose children are all sampled, with the distributions that they were sampled from.

    ``asked.found`` has each node's distribution [V] over the target's vocabulary, or None where it is not finite.
    Nodes of one level are drawn for in order, siblings one after another.

    widths       children of a node by its depth; without replacement fewer where fewer tokens have a probability
    floor        a node of a lower joint log probability gets no children, but stays: it was sampled
    replacement  whether siblings are independent of each other
    """
    tokens, parents, depths, joint, at = [asked.tokens[0]], [-1], [0], [0.0], [0]
    laws: list[Tensor | None] = []
    level = [0]
    for d in range(depth):
        level = [n for n in level if joint[n] >= floor]
        if needed := list(dict.fromkeys(at[n] for n in level if at[n] not in asked.found)):
            yield needed
        below: list[int] = []
        for n in level:
            law = asked.found[at[n]]
            laws += [None] * (n + 1 - len(laws))
            laws[n] = law
            for token in () if law is None else _drawn(law, _at(widths, d), noise, replacement=replacement):
                below.append(len(tokens))
                at.append(asked.child(at[n], token))
                tokens.append(token)
                parents.append(n)
                depths.append(d + 1)
                joint.append(joint[n] + math.log(float(law[token])))
                if widths[0] == widths[-1] == 1:
                    asked.chain.append(at[-1])
        level = below
    known = next((law for law in laws if law is not None), None)
    return DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        draft_probs=None
        if known is None
        else torch.stack([torch.zeros_like(known) if law is None else law for law in laws]),
        replacement=replacement,
        sources=_sources(depths, label),
        log_probs=np.array(joint, np.float32),
    )


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


def _drawn(law_V: Tensor, count: int, noise: np.random.Generator, *, replacement: bool) -> list[int]:
    """Up to ``count`` tokens drawn from a distribution; without replacement no more than have a probability."""
    if replacement:
        return inverse_cdf(law_V.expand(count, -1), noise.random(count)).tolist()
    rest_V, found = law_V.clone(), list[int]()
    for uniform in noise.random(min(count, int((law_V > 0).sum()))):
        found.append(int(inverse_cdf(rest_V[None], [uniform])))
        rest_V[found[-1]] = 0.0
    return found


def _sources(depths: Sequence[int], label: str) -> tuple[str, ...]:
    return tuple("target" if d == 0 else f"{label} {d}" for d in depths)
