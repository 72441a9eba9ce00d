"""The lead of a draft: its first tokens come from a copy of the target in 4 bits, which itself decodes with streams.

Streams that trail the newest committed token guess the token after the next from the states of the top layers. A copy
of the whole target in 4 bits reads a quarter of the bytes of bf16 weights and nearly always agrees with the target, so
it is worth passes of its own. Each verifies a small tree of streams (``TREE`` nodes), since a few nodes hardly cost
more than one, and the streams then trail the last token that it drafted: staged speculative decoding (Spector and Ré
2023) with the streams as its last stage. Drafting with the target's own quantised weights is also how ML-SpecQD
(Georganas et al. 2025) and QuantSpec (Tiwari et al. 2025) draft.

The copy shares the target's KV cache. It writes its keys and values after the committed ones, where the next pass
overwrites them, so the target never reads them.

M nodes of a pass of the copy, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from anabranch.methods.base import Call, Row, tally
from anabranch.methods.draft_head import DrawNoise, RowVocabulary
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.draft import DraftOptions, NativeDraft, StreamDraft
from anabranch.methods.streams.native import NativeTrail, narrow_layer
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.stack import Stack, stack_of
from anabranch.tree import DraftTree

__all__ = ["LEAD", "Lead", "Led", "trailing"]

TREE = 4  # nodes that a pass of the copy verifies
LEAD = "lead"  # label of its tokens' sources, before their depth
# (scores + noise) times this are the logits of the probability that the target says the same. Quantisation moves scores
# by about a tenth, so it decides near ties only (docs/log.md).
CERTAINTY = 10.0
OVERFLOWED = -100.0  # log probability of a token after scores that are not finite

_copies: WeakKeyDictionary[Decoder, Stack] = WeakKeyDictionary()


@dataclass(eq=False)
class Led:
    """The lead of a row, while it grows.

    row        the row
    slot       its place in the cache
    words      its own part of the draft vocabulary
    noise      the noise of the tokens after its root; None if it is greedy
    latest     the token that the next pass starts from: the row's root at first
    main_MD    main rows before the streams' first layer; ``node`` is the one of the token before that
    tokens     what was drafted
    log_probs  the joint log probability of each token
    """

    row: Row
    slot: int
    words: RowVocabulary
    noise: DrawNoise | None
    latest: int
    main_MD: Tensor
    node: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def noise_ahead(self, depth: int) -> DrawNoise | None:
        """The noise of the next ``depth`` tokens."""
        first = len(self.tokens)
        return self.noise and replace(self.noise, keys_D=self.noise.keys_D[first : first + depth])


class Lead:
    """Drafts with a 4-bit copy of the target, whose layers are ``stack``.

    following  chooses the token after a state of the copy
    trail      runs the streams
    below      builds the trees that the copy verifies
    start      the streams' first layer
    """

    def __init__(
        self, stack: Stack, following: NativeDraft, trail: NativeTrail, below: StreamDraft, start: int
    ) -> None:
        self._stack, self._following, self._trail, self._below, self._start = stack, following, trail, below, start
        layers = stack.config.num_layers
        self._call = Call("copy", layers, layers, stack.nbytes + below.head.read)
        self.beyond = below.depth  # tokens that the last pass may draft beyond those asked for

    @staticmethod
    def of(target: Decoder, adapter: StreamModule, trail: NativeTrail) -> Lead | None:
        """A lead over the draft vocabulary of ``adapter``; None unless the native kernels run bf16 weights."""
        stack = stack_of(target.backend)
        if stack is None or stack.kind != "bfloat16":
            return None
        one = StreamDraft(target, adapter, DraftOptions(tree="chain", depth=1, condition=False))
        following = NativeDraft.of(one, certainty=CERTAINTY)
        if following is None:
            return None
        if target not in _copies:
            _copies[target] = Stack.of_target(target, [narrow_layer(block) for block in target.blocks])
        below = StreamDraft(target, adapter, DraftOptions(nodes=TREE, copy=True))
        return Lead(_copies[target], following, trail, below, adapter.start)

    def run(self, rows: Sequence[Led], cache: Cache, count: int, most: int) -> None:
        """Draft at least ``count`` tokens after each row's root, and at most ``most``; slots ascend.

        The noise of a sampled row is that of ``most`` tokens and those of a tree after them.
        """
        while going := [row for row in rows if len(row.tokens) < count]:
            self._pass(going, cache, most)

    def _pass(self, rows: Sequence[Led], cache: Cache, most: int) -> None:
        trees = self._trees(rows, cache, most)
        lengths, counts = _lengths(rows, cache), [0] * cache.count
        for row, tree in zip(rows, trees, strict=True):
            counts[row.slot] = tree.size
        parents_M = np.concatenate([tree.parents for tree in trees])
        step = self._stack.step(lengths, counts, parents_M, cache.capacity)
        tokens_M = np.concatenate([tree.tokens for tree in trees])
        hidden_MD, _, main_MD = self._stack.through(tokens_M, step, cache, 0, need="hidden", tapped=self._start)
        assert main_MD is not None, "the pass was asked for these rows"
        tally(self._call, [row.row for row in rows])
        first = 0
        for row, tree in zip(rows, trees, strict=True):
            here = slice(first, first + tree.size)
            path = self._follow(row, tree, hidden_MD[here], most)
            row.main_MD, row.node = main_MD, first + path[-1]
            cache.gather(row.slot, lengths[row.slot], path)
            first += tree.size

    def _trees(self, rows: Sequence[Led], cache: Cache, most: int) -> list[DraftTree]:
        """What the copy verifies after each row's latest token: only that where one more token is wanted."""
        if most - max(len(row.tokens) for row in rows) < 2:
            return [DraftTree.root(row.latest) for row in rows]
        states = trailing(self._trail, rows, cache, self._below.depth)
        noise = [row.noise_ahead(self._below.depth) for row in rows]
        ahead = [row.tokens for row in rows]
        return self._below.build(states, [row.latest for row in rows], [row.words for row in rows], noise, ahead)

    def _follow(self, row: Led, tree: DraftTree, hidden_ND: Tensor, most: int) -> list[int]:
        """Take in what the copy says along a tree [N]; returns the path of nodes that it agrees with."""
        path = [0]
        while True:
            node = path[-1]
            drafted = self._following.nodes(hidden_ND[node : node + 1], row.latest, row.words, row.noise_ahead(1))
            above, found = row.log_probs[-1] if row.log_probs else 0.0, len(drafted.tokens) > 1
            row.latest = drafted.tokens.item(1) if found else row.latest
            row.log_probs.append(above + (drafted.log_probs.item(1) if found else OVERFLOWED))
            row.tokens.append(row.latest)
            same = [child for child in tree.children(node) if tree.tokens[child] == row.latest]
            if not same or len(row.tokens) >= most:
                return path
            path += same


def trailing(trail: NativeTrail, rows: Sequence[Led], cache: Cache, streams: int) -> list[Tensor]:
    """The states [S, D] of streams that trail the latest token of rows, whose slots ascend."""
    nodes, emitted, counts = ([0] * cache.count for _ in range(3))
    main_MD, together = rows[0].main_MD, all(row.main_MD is rows[0].main_MD for row in rows)
    if not together:
        main_MD = torch.stack([row.main_MD[row.node] for row in rows])
    for i, row in enumerate(rows):
        nodes[row.slot], emitted[row.slot] = row.node if together else i, row.latest
        counts[row.slot] = streams
    tally(trail.call, [row.row for row in rows])
    states = trail.run(main_MD, nodes, emitted, counts, cache, lengths=_lengths(rows, cache))
    return [states] if len(rows) == 1 else list(states.view(len(rows), streams, -1))


def _lengths(rows: Sequence[Led], cache: Cache) -> list[int]:
    """The tokens that each row of the cache has, with those of leads."""
    lengths = list(cache.lengths)
    for row in rows:
        lengths[row.slot] += len(row.tokens)
    return lengths
