"""The lead of a draft: its first tokens come from a copy of the target in 4 bits, one narrow pass each.

Streams that trail the newest committed token guess the token after the next from the states of the top layers. A copy
of the whole target in 4 bits reads a quarter of the bytes of bf16 weights and nearly always agrees with the target, so
it is worth a pass of its own: it drafts the first tokens, and the streams trail those. Drafting with the target's own
quantised weights is also how ML-SpecQD (Georganas et al. 2025) and QuantSpec (Tiwari et al. 2025) draft.

The copy shares the target's KV cache. It writes its keys and values after the committed ones, where the next pass
overwrites them, so the target never reads them.

A rows of the batch that draft, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from anabranch.methods.draft_head import DrawNoise, RowVocabulary
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.draft import DraftOptions, NativeDraft, StreamDraft
from anabranch.methods.streams.native import narrow_layer
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.stack import Stack, stack_of

__all__ = ["LEAD", "Lead", "Led"]

LEAD = "lead"  # label of its tokens' sources, before their depth
# (scores + noise) times this are the logits of the probability that the target says the same. Quantisation moves scores
# by about a tenth, so it decides near ties only (docs/log.md).
CERTAINTY = 10.0
OVERFLOWED = -100.0  # log probability of a token after scores that are not finite

_copies: WeakKeyDictionary[Decoder, Stack] = WeakKeyDictionary()


class Led(NamedTuple):
    """What a lead drafted.

    tokens     of each of the A rows, one for each pass
    log_probs  the joint log probability of each of them
    main_AD    main rows of the last pass before the streams' first layer
    """

    tokens: list[list[int]]
    log_probs: list[list[float]]
    main_AD: Tensor


class Lead:
    """Drafts with a 4-bit copy of the target, whose layers are ``stack``; ``following`` chooses the next token.

    start  the streams' first layer
    """

    def __init__(self, stack: Stack, following: NativeDraft, start: int) -> None:
        self._stack, self._next, self._start = stack, following, start

    @staticmethod
    def of(target: Decoder, adapter: StreamModule) -> Lead | None:
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
        return Lead(_copies[target], following, adapter.start)

    def run(
        self,
        roots: Sequence[int],
        slots: Sequence[int],
        words: Sequence[RowVocabulary],
        noise: Sequence[DrawNoise | None],
        cache: Cache,
        planned: int,
        count: int,
    ) -> Led:
        """Draft ``count`` tokens after each root; ``slots`` ascend, and ``noise`` has that of ``count`` positions."""
        counts = [0] * cache.count
        for slot in slots:
            counts[slot] = 1
        latest, main_AD = list(roots), None
        tokens: list[list[int]] = [[] for _ in roots]
        log_probs: list[list[float]] = [[] for _ in roots]
        for ahead in range(count):
            step = self._stack.step([length + ahead for length in cache.lengths], counts, None, planned)
            fed = np.array(latest, np.int64)
            hidden_AD, _, main_AD = self._stack.through(fed, step, cache, 0, choose=False, tapped=self._start)
            for i, root in enumerate(latest):
                drawn = noise[i]
                here = None if drawn is None else replace(drawn, keys_D=drawn.keys_D[ahead : ahead + 1])
                drafted = self._next.nodes(hidden_AD[i : i + 1], root, words[i], here)
                found = len(drafted.tokens) > 1
                latest[i] = drafted.tokens.item(1) if found else root
                above = log_probs[i][-1] if ahead else 0.0
                log_probs[i].append(above + (drafted.log_probs.item(1) if found else OVERFLOWED))
                tokens[i].append(latest[i])
        assert main_AD is not None, "a lead has at least one token"
        return Led(tokens, log_probs, main_AD)
