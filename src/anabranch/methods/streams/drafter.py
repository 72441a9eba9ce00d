"""Speculative Streaming as a drafter: the target's own streams, read at the accepted node, become the next tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Context, Drafter, Observation
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import DraftOptions, DrawNoise, RowVocabulary, StreamDraft
from anabranch.methods.streams.native import NativeTrail
from anabranch.methods.streams.rider import StreamRider, trail
from anabranch.model.decoder import Block, Decoder, Rider
from anabranch.model.graphs import span_bucket
from anabranch.sampling import COLDEST, SamplingParams, generator, position_keys
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["StreamDrafter"]

# the lane of the counter-based noise that drafts are sampled with; the target's own draws use lane 0, reject lane 1
DRAFT_LANE = 2


class StreamDrafter(Drafter):
    """Drafts from speculative streams (ACL section 2.2).

    options    the shape of the tree
    prune      nodes that pass the early-exit pruning layer; 0: no pruning. Where it prunes, the tree that was drawn
               is not the tree that is verified, so only *matching* is exact and sampled drafts are refused
    placement  "ride": stream rows travel with every tree node in the target's pass (the paper); "trail": those of the
               accepted node alone follow it; "auto": trail where the adapter can tell them the emitted token, and on a
               CPU, where rows cost time; else ride, which at batch 1 is nearly free on a GPU
    """

    name = "streams"
    rules = ("match", "rejection")

    def __init__(
        self,
        target: Decoder,
        adapter: StreamAdapter,
        options: DraftOptions | None = None,
        *,
        prune: int = 0,
        placement: Literal["auto", "ride", "trail"] = "auto",
    ) -> None:
        if placement not in ("auto", "ride", "trail"):
            raise InputError(f"placement must be auto, ride or trail, not {placement!r}")
        if not isinstance(prune, int) or prune < 0 or prune == 1:
            raise InputError(f"prune must be 0 (off) or the number of nodes to keep, at least 2, not {prune!r}")
        if prune and adapter.prune is None:
            raise CapabilityError("this adapter was trained without a pruning layer (pruning_rank 0); use prune=0")
        if placement == "trail" and adapter.config.context_top:
            raise CapabilityError("context_top needs the main rows' attention; use placement=ride")
        self.target, self.adapter, self.prune = target, adapter, prune
        self.tree = StreamDraft(target, adapter, options)
        better = (target.device.type == "cpu" or adapter.root is not None) and not adapter.config.context_top
        ride = placement == "ride" or (placement == "auto" and not better)
        self._rider = StreamRider(target, adapter, ride=ride, prune=prune)
        self._native = (
            NativeTrail(target, adapter, self.tree.depth) if not ride and NativeTrail.fits(target, adapter) else None
        )
        if not ride and self._native is None:
            for index in range(adapter.start, len(target.blocks)):
                block = target.blocks[index]
                assert isinstance(block, Block)
                adapter.layer(index).merge(block)
        o, depth = self.tree.options, self.tree.depth
        self.max_nodes = o.nodes if o.tree == "best" else sum(o.children**d for d in range(depth + 1))
        self._states: dict[int, Tensor] = {}
        self._words: dict[int, RowVocabulary] = {}

    @property
    def room(self) -> int:
        """The tree's, and where they trail by the native kernels the streams' own."""
        return max(self.max_nodes, 0 if self._native is None else self.adapter.config.num_streams)

    @property
    def rider(self) -> Rider:
        """The streams' place in the pass."""
        return self._rider

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """*rejection* needs trees that were sampled and stay as they were drawn."""
        super().check(sampling, rule)
        if rule == "rejection":
            if self.prune:
                raise CapabilityError(
                    "pruning removes sampled nodes, so rule='rejection' is not exact; use rule='match' or prune=0"
                )
            if self.tree.options.tree == "best":
                raise CapabilityError(
                    "best-first trees hold the most probable nodes and no samples, so rule='rejection' is not exact; "
                    "use rule='match', or tree=product or tree=chain"
                )
            if sampling.greedy or sampling.needs_history:
                raise CapabilityError(
                    "rule='rejection' draws its drafts from the streams' own law and needs temperature > 0 without "
                    "repetition penalty or logits processors; use rule='match'"
                )

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """Trees from the states that the last step left; the root alone where there are none yet."""
        known = [b for b, context in enumerate(contexts) if context.key in self._states and context.room > 0]
        batch = [b for b in known if contexts[b].rule == "match"]
        trees = [] if len(batch) == len(contexts) else [DraftTree.root(context.root) for context in contexts]
        if batch:
            states = [self._states[contexts[b].key] for b in batch]
            words = [self._vocabulary(contexts[b]) for b in batch]
            roots, drawn = [contexts[b].root for b in batch], [self._noise(contexts[b]) for b in batch]
            built = self.tree.build(states, roots, words, drawn)
            for i, (b, tree) in enumerate(zip(batch, built, strict=True)):
                room = contexts[b].room
                if self.tree.depth > room and tree.max_depth > room:
                    built[i] = tree.select((tree.depths <= room).nonzero()[0])
            if not trees:
                return built
            for b, tree in zip(batch, built, strict=True):
                trees[b] = tree
        for b in known:
            context = contexts[b]
            if context.rule == "rejection":
                noise = generator(context.sampling.seed, len(context.tokens), lane=DRAFT_LANE)
                trees[b] = self.tree.sample(
                    self._states[context.key],
                    context.root,
                    context.sampling,
                    noise,
                    depth=context.room,
                    row=self._vocabulary(context),
                )
        return trees

    def _noise(self, context: Context) -> DrawNoise | None:
        """What the target will draw the next tokens of a row with."""
        sampling = context.sampling
        if sampling.greedy:
            return None
        positions = len(context.tokens) + np.arange(self.tree.depth)
        return DrawNoise(max(sampling.temperature, COLDEST), position_keys(sampling.seed, positions))

    def _vocabulary(self, context: Context) -> RowVocabulary:
        if context.key not in self._words:
            self._words[context.key] = RowVocabulary(self.tree)
        return self._words[context.key].extend(context.tokens)

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        """Keep the streams of each row's accepted node."""
        rider = self._rider
        last = [verdict.path[-1] for verdict in seen.verdicts]
        if rider.ride:
            assert rider.streams_BNSD is not None
            for b, context in enumerate(contexts):
                self._states[context.key] = rider.streams_BNSD[b, last[b]].clone()
            return
        if not any(seen.live):
            return
        entry = rider.entry_BND
        assert entry is not None
        emitted = [context.root for context in contexts]
        if self._native is None:
            rows = torch.arange(len(last), device=entry.device)
            entry_BD = entry[rows, torch.tensor(last, device=entry.device)].to(self.target.dtype)
            states = self._trail(entry_BD, torch.tensor(emitted), seen)
        else:
            states = self._native(entry, last, emitted, seen.cache, seen.planned)
        for b, context in enumerate(contexts):
            self._states[context.key] = states[b]

    def _trail(self, entry_BD: Tensor, emitted_B: Tensor, seen: Observation) -> Tensor:
        """Stream states [B, S, D] of nodes that are committed, from their main rows before layer N - N_s."""
        target, cache, planned = self.target, seen.cache, seen.planned
        span, table = max(cache.lengths), target.rope().table(planned)
        span = span if target.recorder is None else span_bucket(span, cache.capacity)
        layers = range(self.adapter.start, target.config.num_layers)

        def compute(entry_BD: Tensor, emitted_B: Tensor, lengths_B: Tensor) -> tuple[Tensor]:
            keys = torch.arange(span, device=lengths_B.device)
            everything = (keys < lengths_B[:, None])[:, None]
            window = target.config.sliding_window
            near = everything if window is None else everything & ((lengths_B[:, None] - 1 - keys) < window)[:, None]
            states = trail(
                target,
                self.adapter,
                entry_BD[:, None],
                None if self.adapter.root is None else target.embedding(emitted_B)[:, None],
                lengths_B[:, None] - 1,
                [cache.read(layer, span) for layer in layers],
                [near if target.config.is_sliding(layer) else everything for layer in layers],
                planned,
            )
            return (states[:, 0],)

        key = ("trail", id(self), len(emitted_B), span, table.data_ptr())
        inputs = (entry_BD, emitted_B, torch.tensor(cache.lengths))
        (states,) = cache.graphs.run(target.recorder, key, compute, inputs, target.device, held=(table, self))
        return states.clone()

    def leave(self, context: Context) -> None:
        """Forget a row's streams."""
        self._states.pop(context.key, None)
        self._words.pop(context.key, None)
