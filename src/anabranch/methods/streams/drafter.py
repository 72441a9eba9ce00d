"""The drafter of Speculative Streaming: the streams of the accepted node become the next draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Drafter, Observation, Row, Taps
from anabranch.methods.draft_head import DrawNoise, RowVocabulary
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.draft import DraftOptions, StreamDraft
from anabranch.methods.streams.native import NativeTrail
from anabranch.methods.streams.rider import StreamRider, trail
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.graphs import span_bucket
from anabranch.model.passes import Rider
from anabranch.sampling import SamplingParams, generator
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["StreamDrafter"]

# the lane of the random numbers for sampled drafts; the target's own tokens use lane 0, the rejection rule lane 1
DRAFT_LANE = 2


@dataclass
class _State:
    """The state of a row: stream states [S, D] of its last accepted node, and its own part of the draft vocabulary."""

    words: RowVocabulary
    states_SD: Tensor | None = None


class StreamDrafter(Drafter):
    """Drafts from speculative streams (ACL section 2.2).

    options    the shape of the tree
    prune      number of nodes that the early-exit pruning layer keeps; 0: no pruning. A pruned tree is not the one that
               was sampled, so only *matching* is exact
    placement  "ride": stream rows of every tree node are part of the target's pass (the paper); "trail": those of the
               accepted node follow the pass; "auto": trail on a CPU, where rows cost time, or if the adapter conditions
               its streams on the emitted token; otherwise ride, which should be nearly free at batch 1 on a GPU (not
               yet run on one)
    adaptive   whether the number of drafted nodes follows the load, up to ``options.nodes``
    name       of the method
    """

    rules = ("match", "rejection")

    def __init__(
        self,
        target: Decoder,
        adapter: StreamModule,
        options: DraftOptions | None = None,
        *,
        prune: int = 0,
        placement: Literal["auto", "ride", "trail"] = "auto",
        adaptive: bool = False,
        name: str = "streams",
    ) -> None:
        if placement not in ("auto", "ride", "trail"):
            raise InputError(f"placement must be auto, ride or trail, got {placement!r}")
        if not isinstance(prune, int) or prune < 0 or prune == 1:
            raise InputError(f"prune must be 0 (off) or the number of nodes to keep, at least 2, got {prune!r}")
        if prune and adapter.prune is None:
            raise CapabilityError("the adapter was trained without a pruning layer (pruning_rank 0); use prune=0")
        if placement == "trail" and adapter.shape.context_top:
            raise CapabilityError("context_top needs the main rows' attention; use placement=ride")
        riding = target.rider
        if adapter.shape.main_attends == "own":
            if riding is None or riding.alters is not adapter:
                raise CapabilityError(
                    "the streams of this adapter are part of its target (shared mode), which was loaded without them; "
                    "load the target together with this adapter"
                )
            if placement == "trail":
                raise CapabilityError(
                    "the target's main rows attend to these streams, so they ride; use placement=ride"
                )
            placement = "ride"
        self.target, self.adapter, self.prune, self.adaptive, self.name = target, adapter, prune, adaptive, name
        self.tree = StreamDraft(target, adapter, options)
        self._trees = {self.tree.options.nodes: self.tree}
        better = (target.device.type == "cpu" or adapter.root is not None) and not adapter.shape.context_top
        ride = placement == "ride" or (placement == "auto" and not better)
        self._rider: Rider | None = None
        if placement == "ride" and not prune and riding is not None and riding.alters is adapter:
            self._rider = riding  # one object, so that rows with and without drafts share passes
        elif ride or prune:
            self._rider = StreamRider(target, adapter, ride=ride, prune=prune)
        self._native = (
            NativeTrail(target, adapter, self.tree.depth) if not ride and NativeTrail.fits(target, adapter) else None
        )
        self.needs = Taps((adapter.start,) if not ride and adapter.reads_main else ())
        if not ride and self._native is None:
            for index in range(adapter.start, len(target.blocks)):
                block = target.blocks[index]
                assert isinstance(block, Block)
                adapter.layer(index).merge(block)
        o, depth = self.tree.options, self.tree.depth
        self.max_nodes = o.nodes if o.tree == "best" else sum(o.children**d for d in range(depth + 1))

    @property
    def margin(self) -> int:
        """The tree's nodes; if streams trail on the native kernels, at least the streams' positions."""
        return max(self.max_nodes, 0 if self._native is None else self.adapter.shape.num_streams)

    @property
    def rider(self) -> Rider | None:
        """The rider, if streams ride in the pass or prune it."""
        return self._rider

    def depth_of(self, budget: int) -> int:
        """The number of streams that a tree of ``budget`` nodes uses."""
        if self.tree.options.tree != "best":
            return self.tree.depth
        return replace(self.tree.options, nodes=max(2, min(budget, self.max_nodes))).streams(self.tree.depth)

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """*Rejection* needs sampled trees, verified without changes."""
        super().check(sampling, rule)
        if rule == "rejection":
            if self.prune:
                raise CapabilityError(
                    "pruning removes sampled nodes, so rule='rejection' is not exact; use rule='match' or prune=0"
                )
            if self.tree.options.tree == "best":
                raise CapabilityError(
                    "best-first trees hold the most probable nodes, not sampled ones, so rule='rejection' is not "
                    "exact; use rule='match', or tree=product or tree=chain"
                )
            if sampling.greedy or sampling.needs_history:
                raise CapabilityError(
                    "rule='rejection' samples its drafts from the drafter's own distribution and needs temperature > 0 "
                    "without repetition penalty or logits processors; use rule='match'"
                )

    def join(self, row: Row) -> None:
        """A new row has no stream states before its first step."""
        row.state[self] = _State(self.tree.row())

    def _sized(self, budget: int) -> StreamDraft:
        """The builder of best-first trees of ``budget`` nodes; all sizes share packed weights."""
        options = self.tree.options
        if options.tree != "best" or budget >= options.nodes:
            return self.tree
        if budget not in self._trees:
            self._trees[budget] = StreamDraft(self.target, self.adapter, replace(options, nodes=budget))
        return self._trees[budget]

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees from the stream states of the last step; only the root for rows that have none yet."""
        found = [DraftTree.root(row.root) for row in rows]
        if budget < 2:
            return found
        known = [b for b, row in enumerate(rows) if row.max_depth > 0 and self._states(row) is not None]
        if batch := [b for b in known if rows[b].rule == "match"]:
            states = [states for b in batch if (states := self._states(rows[b])) is not None]
            draft = self._sized(budget)
            while draft.depth > min(map(len, states)):  # states were prepared for a smaller tree
                budget = min(budget, draft.options.nodes) - 1
                draft = self._sized(budget)
            words = [self._words(rows[b]) for b in batch]
            roots, drawn = [rows[b].root for b in batch], [DrawNoise.of(rows[b], draft.depth) for b in batch]
            for b, tree in zip(batch, draft.build(states, roots, words, drawn), strict=True):
                limit = rows[b].max_depth
                fits = draft.depth <= limit or tree.max_depth <= limit
                found[b] = tree if fits else tree.select((tree.depths <= limit).nonzero()[0])
        for b in known:
            row, states_SD = rows[b], self._states(rows[b])
            if row.rule == "rejection" and states_SD is not None:
                noise = generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE)
                found[b] = self.tree.sample(
                    states_SD, row.root, row.sampling, noise, depth=row.max_depth, row=self._words(row)
                )
        return found

    def _states(self, row: Row) -> Tensor | None:
        state: _State = row.state[self]
        return state.states_SD

    def _words(self, row: Row) -> RowVocabulary:
        state: _State = row.state[self]
        return state.words.extend(row.tokens)

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep the stream states of each row's accepted node; not computed if nothing will be drafted."""
        result = seen.result
        last = [result.starts_B[slot] + v.path[-1] for slot, v in zip(seen.slots, seen.verdicts, strict=True)]
        for row in rows:
            row.state[self].states_SD = None
        if seen.budget < 2 or not any(seen.live):
            return
        if self._rider is not None and self._rider.rides:
            assert result.riding_MSD is not None
            for row, at in zip(rows, last, strict=True):
                row.state[self].states_SD = result.riding_MSD[at].clone()
            return
        going = [i for i, live in enumerate(seen.live) if live]
        # streams that start from no main row only need to know how many there are
        main_MD = result.taps[self.adapter.start] if self.adapter.reads_main else result.hidden_MD
        emitted = [row.root for row in rows]
        if self._native is None:
            at_B = torch.tensor([last[i] for i in going], device=main_MD.device)
            tokens_B = torch.tensor([emitted[i] for i in going])
            states = self._trail(main_MD[at_B].to(self.target.dtype), tokens_B, [seen.slots[i] for i in going], seen)
        else:
            depth = self.depth_of(seen.budget)
            nodes, tokens, counts = ([0] * seen.cache.count for _ in range(3))
            for i in going:
                nodes[seen.slots[i]], tokens[seen.slots[i]], counts[seen.slots[i]] = last[i], emitted[i], depth
            order = sorted(going, key=seen.slots.__getitem__)
            flat = self._native.run(main_MD, nodes, tokens, counts, seen.cache, seen.planned)
            by_slot = flat.view(len(going), depth, -1)
            states = by_slot if order == going else by_slot[[order.index(i) for i in going]]
        for i, states_SD in zip(going, states, strict=True):
            rows[i].state[self].states_SD = states_SD

    def _trail(self, entry_BD: Tensor, emitted_B: Tensor, slots: Sequence[int], seen: Observation) -> Tensor:
        """Stream states [B, S, D] of committed nodes, from their main rows before layer N - N_s."""
        target, cache, planned = self.target, seen.cache, seen.planned
        lengths = [cache.lengths[slot] for slot in slots]
        together = list(slots) == list(range(len(slots)))
        span, table = max(lengths), target.rope().table(planned)
        span = span if target.backend.capture is None else span_bucket(span, cache.capacity)
        layers = range(self.adapter.start, target.config.num_layers)

        def compute(entry_BD: Tensor, emitted_B: Tensor, lengths_B: Tensor, slots_B: Tensor) -> tuple[Tensor]:
            keys = torch.arange(span, device=lengths_B.device)
            everything = (keys < lengths_B[:, None])[:, None]
            window = target.config.sliding_window
            near = everything if window is None else everything & ((lengths_B[:, None] - 1 - keys) < window)[:, None]
            where = slice(0, len(slots)) if together else slots_B
            states = trail(
                target,
                self.adapter,
                entry_BD[:, None],
                None if self.adapter.root is None else target.embedding(emitted_B)[:, None],
                lengths_B[:, None] - 1,
                [(cache.keys[layer, where, :, :span], cache.values[layer, where, :, :span]) for layer in layers],
                [near if target.config.is_sliding(layer) else everything for layer in layers],
                planned,
            )
            return (states[:, 0],)

        key = ("trail", id(self), len(slots), together, span, table.data_ptr())
        inputs = (entry_BD, emitted_B, torch.tensor(lengths), torch.tensor(slots))
        (states,) = cache.graphs.run(target.backend.capture, key, compute, inputs, target.device, held=(table, self))
        return states.clone()
