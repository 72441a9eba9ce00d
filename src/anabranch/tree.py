"""The draft tree: proposed tokens and their structure, on the host, in a few small integer arrays.

        The  (0)                     tokens   The cat dog sat ran
        +-- cat  (1)                 parents   -1   0   0   1   1
        |   +-- sat  (3)             depths     0   1   1   2   2
        |   +-- ran  (4)
        +-- dog  (2)

Node 0 is the root: the last committed token, not yet in the cache. ``parents[i] < i``, so a single scan from left
to right visits every parent before its children. Mask, depths and children all follow from ``parents``.

A tree carries ``draft_probs`` only if every child was *sampled* from them. Every operation that can remove, merge or
reorder nodes drops them, even if it happens to leave all nodes in place: that may depend on the sampled tokens, and the
*rejection* rule is exact only on average over all of them (see ``verify``). The exception is a rule that does not look
at the sampled tokens of other nodes, and says which tokens it lets stay (``select``).

Legend: N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["DraftTree", "depths_of", "mask_of"]

UNKNOWN_LOG_PROB = math.log(0.5)  # of each token of a drafter that gives none
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Proposed tokens and their structure; see the drawing at the top of this module.

    tokens       [N] int64
    parents      [N] int64, parents[0] = -1 and parents[i] < i
    draft_probs  [N, V] or None; row i is the distribution q that the children of node i were sampled from, in
                 sibling order. Rows of leaves are never read; rows after the last parent may be missing
    replacement  siblings were sampled with replacement
    sources      [N] label of the drafter that proposed each node; "target" for the root
    log_probs    [N] float32 or None: the drafter's joint log probability of the path to each node, 0 at the root
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    draft_probs: torch.Tensor | None = field(default=None, repr=False)
    replacement: bool = True
    sources: tuple[str, ...] = ()
    log_probs: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        size = len(self.tokens)
        if not self.sources:
            object.__setattr__(self, "sources", _labels("draft", size - 1))
        # Plain lists: numpy is slow here because the forward pass has evicted its code from the CPU's caches.
        assert self.tokens.dtype == _INT64, "tokens are int64"
        assert self.parents.dtype == _INT64, "parents are int64"
        assert self.tokens.shape == self.parents.shape == (size,), "one parent for each token"
        assert size > 0, "a tree has a root"
        first, *parents = self.parents.tolist()
        assert first == -1, "node 0 is the root"
        assert all(parent < node for node, parent in enumerate(parents, 1)), "parents come before their children"
        assert min(parents, default=0) >= 0, "there is one root"
        assert len(self.sources) == size, "one source for each node"
        if self.log_probs is not None:
            assert self.log_probs.dtype == _FLOAT32, "log_probs are float32"
            assert self.log_probs.shape == (size,), "one log probability for each node"
            assert not any(map(math.isnan, self.log_probs.tolist())), "log_probs are numbers"
        if self.draft_probs is not None:
            assert self.draft_probs.ndim == 2, "draft_probs are [N, V]"
            assert self.parents.max() < len(self.draft_probs) <= size, "one row of draft_probs for each parent"

    # --- constructors -------------------------------------------------------------------------------------------

    @staticmethod
    def unchecked(
        tokens: NDArray[np.int64],
        parents: NDArray[np.int64],
        sources: tuple[str, ...],
        log_probs: NDArray[np.float32] | None,
        *,
        replacement: bool = True,
    ) -> DraftTree:
        """Construct a tree without checks, for arrays that were cut from a tree or built by the kernels."""
        made = object.__new__(DraftTree)
        made.__dict__.update(tokens=tokens, parents=parents, draft_probs=None, replacement=replacement)
        made.__dict__.update(sources=sources, log_probs=log_probs)
        return made

    @staticmethod
    def root(token: int) -> DraftTree:
        """Return a tree of the root alone, without a draft: plain decoding."""
        return DraftTree.unchecked(
            np.array([token], np.int64), np.array([-1], np.int64), ("target",), np.zeros(1, np.float32)
        )

    @staticmethod
    def roots(tokens: Sequence[int]) -> list[DraftTree]:
        """Return a tree of the root alone for each token; they share arrays, so many rows cost little."""
        each = np.array(tokens, np.int64)
        parents, log_probs, sources = np.array([-1], np.int64), np.zeros(1, np.float32), ("target",)
        return [DraftTree.unchecked(each[b : b + 1], parents, sources, log_probs) for b in range(len(each))]

    @classmethod
    def chain(
        cls,
        root: int,
        tokens: Sequence[int],
        *,
        source: str = "draft",
        draft_probs: torch.Tensor | None = None,
        log_probs: Sequence[float] | NDArray[np.float32] | None = None,
    ) -> DraftTree:
        """Return root - tokens[0] - tokens[1] - ...

        draft_probs  [n, V] for n tokens: row i is the distribution that tokens[i] was sampled from
        log_probs    [n]: entry i is the joint log probability of tokens[0] to tokens[i]
        """
        size = 1 + len(tokens)
        return cls(
            np.array([root, *tokens], np.int64),
            np.arange(-1, size - 1, dtype=np.int64),
            draft_probs=draft_probs,
            sources=_labels(source, size - 1),
            log_probs=None if log_probs is None else np.array([0.0, *log_probs], np.float32),
        )

    @classmethod
    def from_paths(
        cls,
        root: int,
        paths: Sequence[Sequence[int]],
        *,
        source: str | Sequence[str] = "draft",
        log_probs: Sequence[Sequence[float]] | None = None,
    ) -> DraftTree:
        """Return the prefix trie of several continuations of the root.

        ``from_paths(9, [[1, 2], [1, 3], [2]])`` is

            9 (0) +-- 1 (1) +-- 2 (2)        tokens   9  1  2  3  2
                  |         +-- 3 (3)        parents -1  0  1  1  0
                  +-- 2 (4)

        source     one label, or one per path
        log_probs  joint log probabilities, in the shape of ``paths``; a shared node keeps the highest
        """
        if len(paths) == 1:
            label = source if isinstance(source, str) else source[0]
            return cls.chain(root, paths[0], source=label, log_probs=None if log_probs is None else log_probs[0])
        trie = _Trie(root)
        for k, path in enumerate(paths):
            label = source if isinstance(source, str) else source[k]
            node = 0
            for depth, token in enumerate(path):
                joint = log_probs[k][depth] if log_probs is not None else UNKNOWN_LOG_PROB * (depth + 1)
                node = trie.add(node, token, label, joint)
        return trie.tree(with_log_probs=log_probs is not None)

    # --- derived from parents -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """N, the root included."""
        return len(self.tokens)

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """[N] distance from the root: the position of node i is the root's position + depths[i]."""
        return depths_of(self.parents)

    @property
    def max_depth(self) -> int:
        """The number of drafted tokens on the longest path."""
        return int(self.depths.max())

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """[N, N] attention mask: mask[i, j] is True if j is i or an ancestor of i.

        The tree at the top of this module:    1 . . . .
                                               1 1 . . .
                                               1 . 1 . .
                                               1 1 . 1 .
                                               1 1 . . 1
        """
        return mask_of(self.parents)

    @cached_property
    def _children(self) -> list[tuple[int, ...]]:
        children: list[list[int]] = [[] for _ in range(self.size)]
        for node, parent in enumerate(self.parents.tolist()):
            if node:
                children[parent].append(node)
        return [tuple(siblings) for siblings in children]

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of a node in ascending order, which is also the order in which they were sampled."""
        return self._children[node]

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to ``node``, inclusive."""
        path = [node]
        while path[-1] > 0:
            path.append(int(self.parents[path[-1]]))
        return tuple(reversed(path))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The nodes without children, ascending."""
        return tuple(node for node, siblings in enumerate(self._children) if not siblings)

    # --- operations; all of them drop draft_probs ---------------------------------------------------------------

    def select(self, kept: Sequence[int] | NDArray[np.int64], allowed_NV: torch.Tensor | None = None) -> DraftTree:
        """Return the subtree of the ``kept`` nodes: ascending, including the root and the parent of each.

        ``select([0, 1, 4])`` of the tree at the top is The - cat - ran: parents -1 0 1.

        allowed_NV  the tokens that any child of each kept node would have been kept with, decided without regard to
                    the tokens that were sampled. Then the children that are left were sampled from what is left of
                    draft_probs, if siblings were independent of each other (``replacement``)
        """
        if allowed_NV is not None and self.draft_probs is not None and self.replacement:
            rows = torch.as_tensor(kept[: sum(node < len(self.draft_probs) for node in kept)])
            left = self.draft_probs[rows] * allowed_NV[: len(rows)].to(self.draft_probs.device)
            return replace(self.select(kept), draft_probs=left)
        nodes: list[int] = kept.tolist() if isinstance(kept, np.ndarray) else list(kept)
        assert nodes, "the root is kept"
        assert nodes[0] == 0, "the root is kept"
        assert all(map(int.__lt__, nodes, nodes[1:])), "kept nodes are in ascending order"
        assert nodes[-1] < self.size, "kept nodes exist"
        if nodes[-1] == len(nodes) - 1:
            return self._first(len(nodes))
        renamed, above = {node: place for place, node in enumerate(nodes)}, self.parents.tolist()
        assert all(above[node] in renamed for node in nodes[1:]), "the parent of a kept node is kept"
        return DraftTree.unchecked(
            self.tokens[nodes],
            np.array([-1, *(renamed[above[node]] for node in nodes[1:])], np.int64),
            tuple([self.sources[node] for node in nodes]),
            None if self.log_probs is None else self.log_probs[nodes],
            replacement=self.replacement,
        )

    def _first(self, count: int) -> DraftTree:
        """``select(range(count))``, faster: most drafts are cut in this way at every step."""
        if count == self.size and self.draft_probs is None:
            return self
        log_probs = None if self.log_probs is None else self.log_probs[:count]
        return DraftTree.unchecked(
            self.tokens[:count], self.parents[:count], self.sources[:count], log_probs, replacement=self.replacement
        )

    def truncate(self, budget: int) -> DraftTree:
        """Return the ``budget`` most probable nodes, counting the root; without log_probs, the shallowest.

        A child never ranks above its parent, so the result is a tree.
        """
        assert budget >= 1, "the root is kept"
        if budget >= self.size:
            return self._first(self.size)
        rank = self._path_log_probs()
        for node, parent in enumerate(self.parents.tolist()):
            if node:
                rank[node] = min(rank[node], rank[parent])
        rank[0] = math.inf
        # sorted() is stable: among equals the earlier node, and so the parent, comes first.
        best = sorted(range(self.size), key=rank.__getitem__, reverse=True)[:budget]
        return self.select(sorted(best))

    def grafted(self, node: int, tokens: Sequence[int], shares: Sequence[float], source: str) -> DraftTree:
        """Return the tree with a chain of tokens below a node, along the nodes that have these tokens already.

        9 (0) -- 1 (1) with the chain 1, 2 below the root is 9 (0) -- 1 (1) -- 2 (2).

        shares  the probability of each token given those before it. A node that is there already keeps the higher
                probability, and the source with it
        """
        above = list(map(int, self.parents))
        words, sources, joints = self.tokens.tolist(), list(self.sources), self._path_log_probs()
        at = node
        for token, share in zip(tokens, shares, strict=True):
            below = self.children(at) if at < self.size else ()
            known = next((child for child in below if words[child] == token), None)
            joint = joints[at] + math.log(share)
            if known is None:
                words.append(token)
                above.append(at)
                sources.append(source)
                joints.append(joint)
            elif joint > joints[known]:
                sources[known], joints[known] = source, joint
            at = len(words) - 1 if known is None else known
        return DraftTree.unchecked(
            np.array(words, np.int64), np.array(above, np.int64), tuple(sources), np.array(joints, np.float32)
        )

    def beside(self, other: DraftTree) -> DraftTree:
        """Return both trees below their common root: the nodes of ``other`` follow this tree's, without merging.

        9 +-- 1 beside 9 +-- 1 -- 2 is 9 (0) +-- 1 (1), 9 (0) +-- 1 (2) -- 2 (3): parents -1 0 0 2.
        """
        assert other.tokens[0] == self.tokens[0], "trees beside each other share their root"
        below = other.parents[1:]
        return DraftTree(
            np.concatenate((self.tokens, other.tokens[1:])),
            np.concatenate((self.parents, np.where(below == 0, 0, below + self.size - 1))),
            sources=self.sources + other.sources[1:],
        )

    @staticmethod
    def merge(trees: Sequence[DraftTree], budget: int | None = None) -> DraftTree:
        """Return the union of trees that share a root, truncated to ``budget`` nodes (None: all), counting the root.

        A node that several trees propose appears once, with the source that gave it the highest probability. Its
        probability is that of at least one of them being right, taken as independent: 1 - (1 - p)(1 - q). In a tree
        without log_probs every token has probability 1/2.

            9 +-- 1 (-0.1) -- 2 (-0.3)         9 +-- 1 (-0.2) -- 5 (-0.4)
                                                 +-- 4 (-2.0)
        merge into

            9 (0) +-- 1 (1: -0.02) +-- 2 (2: -0.3)
                  |                +-- 5 (3: -0.4)
                  +-- 4 (4: -2.0), dropped at budget 4
        """
        assert trees, "at least one tree"
        trie = _Trie(int(trees[0].tokens[0]), independent=True)
        for tree in trees:
            assert tree.tokens[0] == trees[0].tokens[0], "merged trees share their root"
            renamed = [0] * tree.size
            nodes = zip(tree.parents.tolist(), tree.tokens.tolist(), tree.sources, tree._path_log_probs(), strict=True)
            for node, (parent, token, source, joint) in enumerate(nodes):
                if node:
                    renamed[node] = trie.add(renamed[parent], token, source, joint)
        union = trie.tree(with_log_probs=True)
        return union if budget is None else union.truncate(budget)

    def _path_log_probs(self) -> list[float]:
        joint_N = self.depths * UNKNOWN_LOG_PROB if self.log_probs is None else self.log_probs
        joints: list[float] = joint_N.tolist()
        return joints


def depths_of(parents_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] distance of each node from its root; several nodes may be roots (parent -1)."""
    depths: list[int] = []
    for parent in parents_N.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return np.array(depths, np.int64)


def mask_of(parents_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N, N] attention mask: True if node j is node i or one of its ancestors."""
    # Each row is a bit set in one Python integer, so it costs a single "or" at any depth.
    rows: list[int] = []
    for node, parent in enumerate(parents_N.tolist()):
        rows.append((0 if parent < 0 else rows[parent]) | (1 << node))
    size = len(rows)
    stride = (size + 7) // 8
    packed = np.frombuffer(b"".join([row.to_bytes(stride, "little") for row in rows]), np.uint8)
    bits = np.unpackbits(packed.reshape(size, stride), axis=1, count=size, bitorder="little")
    return bits.view(np.bool_)


class _Trie:
    """A tree under construction, in which the children of a node have distinct tokens.

    A token that is added again keeps the source with the higher probability, and that probability; if the proposals
    are ``independent``, the probability that at least one of them is right.
    """

    def __init__(self, root: int, *, independent: bool = False) -> None:
        self.tokens, self.parents, self.sources, self.joints = [root], [-1], ["target"], [0.0]
        self.independent = independent
        self.nodes: dict[tuple[int, int], int] = {}
        self.highest = [0.0]  # joint log probability by the source that is kept

    def add(self, parent: int, token: int, source: str, joint: float) -> int:
        known = self.nodes.get((parent, token))
        if known is None:
            self.nodes[parent, token] = node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.sources.append(source)
            self.joints.append(joint)
            self.highest.append(joint)
            return node
        wrong = math.expm1(self.joints[known]) * math.expm1(joint)
        if joint > self.highest[known]:
            self.highest[known], self.sources[known] = joint, source
        combined = math.log1p(-wrong) if self.independent and wrong < 1.0 else -math.inf
        self.joints[known] = max(self.highest[known], combined)
        return known

    def tree(self, *, with_log_probs: bool) -> DraftTree:
        return DraftTree(
            np.array(self.tokens, np.int64),
            np.array(self.parents, np.int64),
            sources=tuple(self.sources),
            log_probs=np.array(self.joints, np.float32) if with_log_probs else None,
        )


def _labels(source: str, count: int) -> tuple[str, ...]:
    return ("target", *[source] * count)
