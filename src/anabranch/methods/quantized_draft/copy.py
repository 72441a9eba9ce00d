"""A copy of the target in 4 bits that drafts for it: quantised self-speculation.

The copy reads a quarter of the bytes of bf16 weights and nearly always agrees with the target. Drafting with the
target's own quantised weights is what ML-SpecQD (Georganas et al. 2025) and QuantSpec (Tiwari et al. 2025) do.

The copy shares the target's KV cache. It writes its keys and values after the committed ones, where the next pass
overwrites them, so the target never reads them.

M nodes of a pass of the copy, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from anabranch.drafting.drafter import Call, tally
from anabranch.drafting.head import DraftHead, DrawNoise, RowVocabulary
from anabranch.methods.streams.draft import NativeDraft, StreamSettings
from anabranch.methods.streams.native import Trailed, lengths_with, narrow_layer
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.native_backend import stack_of
from anabranch.model.stack import Stack
from anabranch.tree import DraftTree

__all__ = ["COPY", "Copied", "QuantizedCopy"]

COPY = "quantized"  # label of its tokens' sources, before their depth
# (scores + noise) times this are the logits of the probability that the target says the same. Quantisation moves scores
# by about a tenth, so it decides near ties only (docs/log.md).
CERTAINTY = 10.0
OVERFLOWED = -100.0  # log probability of a token after scores that are not finite

_copies: WeakKeyDictionary[Decoder, Stack] = WeakKeyDictionary()


@dataclass(eq=False)
class Copied(Trailed):
    """A row while the copy drafts for it; ``latest`` is the row's root at first.

    words      its own part of the draft vocabulary
    noise      the noise of the tokens after its root; None if it is greedy
    log_probs  the joint log probability of each token
    """

    words: RowVocabulary = field(kw_only=True)
    noise: DrawNoise | None = field(kw_only=True)
    log_probs: list[float] = field(default_factory=list)

    def noise_ahead(self, depth: int) -> DrawNoise | None:
        """The noise of the next ``depth`` tokens."""
        first = len(self.tokens)
        return self.noise and replace(self.noise, keys_D=self.noise.keys_D[first : first + depth])


class QuantizedCopy:
    """Drafts with a 4-bit copy of the target: one token a pass.

    head    scores the draft vocabulary
    beyond  tokens that the last pass may draft beyond those asked for
    """

    beyond = 0

    def __init__(self, stack: Stack, following: NativeDraft, head: DraftHead, *, tapped: int | None = None) -> None:
        self._stack, self._following, self.head, self._tapped = stack, following, head, tapped
        layers = stack.config.num_layers
        self._call = Call("copy", layers, layers, stack.nbytes + head.read)

    @staticmethod
    def fits(target: Decoder) -> bool:
        """Return whether the native kernels run bf16 weights; a 4-bit copy of others would read no fewer bytes."""
        stack = stack_of(target.backend)
        dense = target.config.experts is None
        return dense and stack is not None and stack.kind == "bfloat16" and target.rider is None

    @staticmethod
    def parts(target: Decoder, head: DraftHead) -> tuple[Stack, NativeDraft] | None:
        """The copy's layers, and what chooses the token after a state of it; None where the kernels lack either."""
        if not QuantizedCopy.fits(target):
            return None
        one = target, head, StreamSettings(tree="chain", depth=1)
        if not NativeDraft.fits(*one, None):
            return None
        if target not in _copies:
            _copies[target] = Stack.of_target(target, [narrow_layer(block) for block in target.blocks])
        return _copies[target], NativeDraft(*one, depth=1, certainty=CERTAINTY)

    def run(self, rows: Sequence[Copied], cache: Cache, count: int, most: int) -> None:
        """Draft at least ``count`` tokens after each row's root, and at most ``most``; slots ascend.

        The noise of a sampled row is that of ``most`` tokens and those of a tree after them.
        """
        while going := [row for row in rows if len(row.tokens) < count]:
            self._pass(going, cache, most)

    def _pass(self, rows: Sequence[Copied], cache: Cache, most: int) -> None:
        trees = self._trees(rows, cache, most)
        lengths, counts = lengths_with(rows, cache), [0] * cache.count
        for row, tree in zip(rows, trees, strict=True):
            counts[row.slot] = tree.size
        parents_M = np.concatenate([tree.parents for tree in trees])
        step = self._stack.step(lengths, counts, parents_M, cache.capacity)
        tokens_M = np.concatenate([tree.tokens for tree in trees])
        taps = () if self._tapped is None else (self._tapped,)
        hidden_MD, _, seen = self._stack.through(tokens_M, step, cache, 0, need="hidden", taps=taps)
        main_MD = None if self._tapped is None else seen[self._tapped]
        tally(self._call, [row.row for row in rows])
        first = 0
        for row, tree in zip(rows, trees, strict=True):
            path = self._follow(row, tree, hidden_MD[first : first + tree.size], most)
            row.main_MD, row.node = row.main_MD if main_MD is None else main_MD, first + path[-1]
            cache.gather(row.slot, lengths[row.slot], path)
            first += tree.size

    def _trees(self, rows: Sequence[Copied], cache: Cache, most: int) -> list[DraftTree]:
        """Tokens that the copy verifies after each row's latest token."""
        return [DraftTree.root(row.latest) for row in rows]

    def _follow(self, row: Copied, tree: DraftTree, hidden_ND: Tensor, most: int) -> list[int]:
        """Verify a tree [N] with the copy, and draft its token at each node of the path; returns the path."""
        path = [0]
        while True:
            node = path[-1]
            drafted = self._following.nodes(hidden_ND[node : node + 1], row.latest, row.words, row.noise_ahead(1))
            above, drafts = row.log_probs[-1] if row.log_probs else 0.0, len(drafted.tokens) > 1
            row.latest = drafted.tokens.item(1) if drafts else row.latest
            row.log_probs.append(above + (drafted.log_probs.item(1) if drafts else OVERFLOWED))
            row.tokens.append(row.latest)
            same = [child for child in tree.children(node) if tree.tokens[child] == row.latest]
            if not same or len(row.tokens) >= most:
                return path
            path += same
