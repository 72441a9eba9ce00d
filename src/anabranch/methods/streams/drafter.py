"""The drafter of Speculative Streaming: the streams of the accepted node become the next draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call, Drafter, Needs, Observation, Row, Traits, tally
from anabranch.drafting.head import DrawNoise, RowVocabulary
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.copying import COPIED, PRIOR
from anabranch.methods.streams.device_draft import DeviceDraft
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.fused import FusedTrail
from anabranch.methods.streams.native import NativeTrail, Trailed, trailing
from anabranch.methods.streams.rider import StreamRider, trail
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.graphs import span_bucket
from anabranch.model.inputs import DeviceTrees
from anabranch.model.pack import read_bytes
from anabranch.model.passes import Rider
from anabranch.sampling import SamplingParams, generator
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["StreamDrafter", "StreamState"]

# the lane of the random numbers for sampled drafts; the target's own tokens use lane 0, the rejection rule lane 1
DRAFT_LANE = 2


@dataclass
class StreamState:
    """The state of a row.

    words      its own part of the draft vocabulary
    states_SD  states of the streams [S, D] that trail the last accepted node
    """

    words: RowVocabulary
    states_SD: Tensor | None = None


class StreamDrafter(Drafter):
    """Drafts from speculative streams (ACL section 2.2).

    settings   of the trees and of their streams; ``prune`` and ``placement`` among them
    name       of the method
    native     runs streams that trail, where the native kernels do
    """

    rules: tuple[Rule, ...] = ("match", "rejection")

    def __init__(
        self,
        target: Decoder,
        adapter: StreamModule,
        settings: StreamSettings | None = None,
        *,
        name: str = "streams",
    ) -> None:
        settings = settings or StreamSettings()
        prune, placement = settings.prune, settings.placement
        if placement not in ("auto", "ride", "trail"):
            raise InputError(f"placement must be auto, ride or trail, got {placement!r}")
        if not isinstance(prune, int) or prune < 0 or prune == 1:
            raise InputError(f"prune must be 0 (off) or the number of nodes to keep, at least 2, got {prune!r}")
        threshold = settings.prune_threshold
        if (prune or threshold) and adapter.prune is None:
            raise CapabilityError(
                "the adapter was trained without a pruning layer (pruning_rank 0); use prune=0 and prune_threshold=0"
            )
        if placement == "trail" and adapter.shape.context_top:
            raise CapabilityError("context_top needs the main rows' attention; use placement=ride")
        if target.encoder is not None and (placement == "ride" or prune or threshold or adapter.shape.context_top):
            raise CapabilityError(
                "streams trail the passes of encoder-decoder models, unpruned and with their whole context; use "
                "placement=trail without prune and prune_threshold, and an adapter with context_top 0"
            )
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
        self.target, self.adapter, self.prune, self.name = target, adapter, prune, name
        self.adaptive, self.tree = settings.adaptive, StreamDraft(target, adapter, settings)
        self._trees = {settings.size: self.tree}
        self._growing: dict[int, DeviceDraft | None] = {}  # on a GPU, by size
        if self.tree.native is not None and self.tree.native.copies:
            self.traits = Traits(repeats="greedy")
        better = target.device.type == "cpu" or adapter.root is not None or target.encoder is not None
        better = better and not adapter.shape.context_top
        ride = placement == "ride" or (placement == "auto" and not better)
        rider: Rider | None = None
        pruned = prune > 0 or threshold > 0
        if placement == "ride" and not pruned and riding is not None and riding.alters is adapter:
            rider = riding  # one object, so that rows with and without drafts share passes
        elif ride or pruned:
            rider = StreamRider(target, adapter, ride=ride, prune=prune, threshold=threshold)
        self.native = (
            NativeTrail(target, adapter, adapter.shape.num_streams)
            if not ride and NativeTrail.fits(target, adapter)
            else None
        )
        self.needs = Needs(
            layers=(adapter.start,) if not ride and adapter.reads_main else (),
            rider=rider,
            positions=0 if self.native is None else adapter.shape.num_streams,
        )
        self._fused: FusedTrail | None = None
        if not ride and self.native is None and FusedTrail.fits(target, adapter):
            self._fused = adapter.shared(target, FusedTrail, lambda: FusedTrail(target, adapter))
        elif not ride and self.native is None:
            for index in range(adapter.start, len(target.blocks)):
                block = target.blocks[index]
                assert isinstance(block, Block)
                adapter.layer(index).merge(block)
        parts = (target.blocks[adapter.start :], adapter.layers, *adapter.terms)
        read = read_bytes(parts) + self.tree.head.read
        self._call = Call("partial", len(adapter.layers), len(target.blocks), read)
        self.max_nodes = settings.size_for(self.tree.depth)

    def depth_of(self, budget: int) -> int:
        """The number of streams that a tree of ``budget`` nodes uses."""
        return self._streams_of(min(budget, self.max_nodes))

    def _streams_of(self, budget: int) -> int:
        """The number of streams that a tree of ``budget`` nodes uses."""
        if self.tree.settings.kind != "best":
            return self.tree.depth
        return self.tree.settings.streams(self.tree.depth, max(2, budget))

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """*Rejection* needs sampled trees, verified without changes."""
        super().check(sampling, rule, source)
        if rule == "rejection":
            if self.prune:
                raise CapabilityError(
                    "keeping a number of nodes makes sampled ones compete, so rule='rejection' is not exact; use "
                    "rule='match', or prune=0 with prune_threshold"
                )
            if self.tree.settings.kind == "best":
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
        row.state[self] = StreamState(self.tree.row())

    def _sized(self, budget: int) -> StreamDraft:
        """The builder of best-first trees of ``budget`` nodes; all sizes share packed weights."""
        settings = self.tree.settings
        if settings.kind != "best" or budget >= settings.size:
            return self.tree
        if budget not in self._trees:
            self._trees[budget] = StreamDraft(self.target, self.adapter, replace(settings, nodes=budget))
        return self._trees[budget]

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees from the stream states of the last step; only the root for rows that have none yet."""
        trees_of: dict[int, DraftTree] = {}
        known = [b for b, row in enumerate(rows) if budget > 1 and row.max_depth > 0 and self._known(row)]
        matching = [b for b in known if rows[b].rule == "match"]
        trees = self._matching([rows[b] for b in matching], budget) if matching else []
        for b, tree in zip(matching, trees, strict=True):
            limit = min(rows[b].max_depth, budget - 1)  # deeper than most trees have nodes
            whole = tree.size <= 1 + limit or tree.max_depth <= limit
            trees_of[b] = tree if whole else tree.select((tree.depths <= limit).nonzero()[0])
        for b in known:
            row, states_SD = rows[b], self._state(rows[b]).states_SD
            if row.rule == "rejection" and states_SD is not None:
                noise = generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE)
                trees_of[b] = self.tree.sample(
                    states_SD, row.root, row.sampling, noise, depth=row.max_depth, row=self._words(row)
                )
        return [trees_of[b] if b in trees_of else DraftTree.root(row.root) for b, row in enumerate(rows)]

    def draft_on_device(self, rows: Sequence[Row], budget: int, lengths: Sequence[int]) -> DeviceTrees | None:
        """Trees of a fixed number of nodes, for rows whose drafts are whole."""
        if budget < 2 or not all(self._known(row) for row in rows):
            return None
        draft = self._sized(min(budget, self.max_nodes))
        if draft.settings.size not in self._growing:
            self._growing[draft.settings.size] = DeviceDraft.of(draft)
        growing = self._growing[draft.settings.size]
        if growing is None or any(row.max_depth < draft.depth for row in rows):
            return None
        states = [state.states_SD for state in map(self._state, rows) if state.states_SD is not None]
        return growing(states, [row.root for row in rows], lengths, [self._words(row) for row in rows])

    def _known(self, row: Row) -> bool:
        """Return whether a draft is prepared for a row."""
        return self._state(row).states_SD is not None

    def _matching(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The trees of rows whose drafts are verified by matching."""
        return self._below(rows, min(budget, self.max_nodes), [()] * len(rows))

    def _below(self, rows: Sequence[Row], budget: int, ahead: Sequence[Sequence[int]]) -> list[DraftTree]:
        """The trees of rows, of ``budget`` nodes, from streams that trail their roots, or the tokens ``ahead``."""
        kept = [self._state(row) for row in rows]
        roots = [more[-1] if more else row.root for row, more in zip(rows, ahead, strict=True)]
        states = [state.states_SD for state in kept if state.states_SD is not None]
        if budget < 2 or len(states) < len(kept):
            return [DraftTree.root(root) for root in roots]
        draft = self._sized(budget)
        while draft.depth > min(map(len, states)):  # states were prepared for a smaller tree
            budget = min(budget, draft.settings.size) - 1
            draft = self._sized(budget)
        drawn = [DrawNoise.of(row, draft.depth, ahead=len(more)) for row, more in zip(rows, ahead, strict=True)]
        return draft.build(states, roots, [self._words(row) for row in rows], drawn, ahead)

    def _state(self, row: Row) -> StreamState:
        state: StreamState = row.state[self]
        return state

    def _forget(self, row: Row) -> None:
        """Drop the draft that was prepared for a row."""
        self._state(row).states_SD = None

    def _words(self, row: Row) -> RowVocabulary:
        words = self._state(row).words.extend(row.tokens)
        words.copy_weight = min(1.0, row.acceptance.factor(COPIED, PRIOR))
        return words

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep the stream states of each row's accepted node; not computed if nothing will be drafted."""
        result = seen.result
        last = [result.starts_B[slot] + v.path[-1] for slot, v in zip(seen.slots, seen.verdicts, strict=True)]
        for row in rows:
            self._forget(row)
        if seen.budget < 2 or not any(seen.live):
            return
        if self.needs.rider is not None and self.needs.rider.rides:
            assert result.riding_MSD is not None
            served = [row for row, live in zip(rows, seen.live, strict=True) if live]
            tally(Call("heads", read=self.tree.head.read), served)
            for row, at in zip(rows, last, strict=True):
                row.state[self].states_SD = result.riding_MSD[at].clone()
            return
        going = [i for i, live in enumerate(seen.live) if live]
        # streams that start from no main row only need to know how many there are
        main_MD = result.taps[self.adapter.start] if self.adapter.reads_main else result.hidden_MD
        if self.native is None:
            served = [rows[i] for i in going]
            tally(self._call, served)
            part = seen._replace(slots=[seen.slots[i] for i in going])
            states = self._trail(served, [last[i] for i in going], main_MD, part)
            for row, states_SD in zip(served, states, strict=True):
                self._state(row).states_SD = states_SD
        else:
            order = sorted(going, key=seen.slots.__getitem__)
            slots, nodes = [seen.slots[i] for i in order], [last[i] for i in order]
            self._prepare(self.native, [rows[i] for i in order], slots, nodes, main_MD, seen)

    def _prepare(
        self,
        native: NativeTrail,
        rows: Sequence[Row],
        slots: Sequence[int],
        nodes: Sequence[int],
        main_MD: Tensor,
        seen: Observation,
    ) -> None:
        """Prepare the next drafts on the native kernels; ``nodes`` are the rows of ``main_MD`` that streams trail.

        ``slots`` of the rows ascend.
        """
        trailed = [
            Trailed(row, slot, row.root, main_MD, node) for row, slot, node in zip(rows, slots, nodes, strict=True)
        ]
        streams = self._streams_of(min(seen.budget, self.max_nodes))
        for row, states_SD in zip(rows, trailing(native, trailed, seen.cache, streams), strict=True):
            self._state(row).states_SD = states_SD

    def _trail(self, rows: Sequence[Row], last: Sequence[int], main_MD: Tensor, seen: Observation) -> list[Tensor]:
        """Stream states [S, D] of each row's last committed node, the rows ``last`` of ``main_MD``.

        On a GPU streams trail all rows of the pass, in their order, unless most of these go on without: a part of the
        cache would have to be copied.
        """
        target, cache = self.target, seen.cache
        slots = list(seen.slots)
        at = dict(zip(slots, zip(last, (row.root for row in rows), strict=True), strict=True))
        count = len(seen.result.counts_B)
        capture = target.backend.capture if target.encoder is None else None  # sources have lengths of their own
        if capture is not None and 2 * len(slots) >= count:
            slots = list(range(count))
        together = slots == list(range(len(slots)))
        lengths = [cache.lengths[slot] for slot in slots]
        span, table = max(lengths), target.rope().rotations(cache.capacity).table
        span = span if capture is None else span_bucket(span, cache.capacity, skips=self._fused is not None)
        layers = range(self.adapter.start, target.config.num_layers)
        memories = [m.above(layers.start) for slot in slots if (m := cache.memories[slot]) is not None]

        def compute(entry_BD: Tensor, numbers_3B: Tensor) -> tuple[Tensor]:
            emitted_B, lengths_B, slots_B = numbers_3B
            where = slice(0, len(slots)) if together else slots_B
            kept = [cache.of_rows(layer, where, span) for layer in layers]
            emitted_BD = None if self.adapter.root is None else target.embedding(emitted_B)
            if self._fused is not None:
                return (self._fused(entry_BD, emitted_BD, lengths_B, kept, table),)
            keys = torch.arange(span, device=lengths_B.device)
            everything = (keys < lengths_B[:, None])[:, None]
            window = target.config.sliding_window
            near = everything if window is None else everything & ((lengths_B[:, None] - 1 - keys) < window)[:, None]
            states = trail(
                target,
                self.adapter,
                entry_BD[:, None],
                None if emitted_BD is None else emitted_BD[:, None],
                lengths_B[:, None] - 1,
                kept,
                [near if target.config.is_sliding(layer) else everything for layer in layers],
                cache.capacity,
                lengths_B=lengths_B,
                memories=memories,
            )
            return (states[:, 0],)

        key = ("trail", id(self), len(slots), together, span, table.data_ptr())
        known = [(*at.get(slot, (0, 0)), length, slot) for slot, length in zip(slots, lengths, strict=True)]
        numbers_4B = torch.tensor(known).T.contiguous().to(target.device, non_blocking=True)
        inputs = (main_MD[numbers_4B[0]].to(target.dtype), numbers_4B[1:])
        (states,) = cache.graphs.run(capture, key, compute, inputs, target.device, held=(table, self))
        states = states.clone()
        return [states[slots.index(slot)] for slot in seen.slots]
