"""The drafter of Speculative Streaming: the streams of the accepted node become the next draft tree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Call, Drafter, Observation, Row, Taps, tally
from anabranch.methods.draft_head import DrawNoise, RowVocabulary
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.copying import COPIED, PRIOR
from anabranch.methods.streams.draft import DraftOptions, StreamDraft
from anabranch.methods.streams.lead import LEAD, Lead, Led, trailing
from anabranch.methods.streams.native import NativeTrail
from anabranch.methods.streams.rider import StreamRider, trail
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.graphs import span_bucket
from anabranch.model.passes import Rider
from anabranch.model.reads import read_bytes
from anabranch.sampling import SamplingParams, generator
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["StreamDrafter"]

# Tokens of a lead where it is not given, and the most rows that have one: a pass of the copy over many rows is bound by
# arithmetic like the target's own (docs/log.md).
AUTO_LEAD, LED_ROWS = 1, 1
# the fewest nodes of a led draft whose size follows the load, and what to expect of it (docs/log.md)
LED_NODES, LED_LENGTH = 8, 4.5
# the lane of the random numbers for sampled drafts; the target's own tokens use lane 0, the rejection rule lane 1
DRAFT_LANE = 2


@dataclass
class _State:
    """The state of a row.

    words      its own part of the draft vocabulary
    lead       tokens that were drafted before the streams, after the root
    log_probs  the joint log probability of each of them
    states_SD  states of the streams [S, D] that trail the last accepted node, or the lead
    """

    words: RowVocabulary
    lead: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    states_SD: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether a draft is prepared."""
        return self.states_SD is not None or bool(self.lead)


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
    lead       tokens that a 4-bit copy of the target drafts before the streams (``lead.Lead``), or a few more, since
               one pass may bring several; "auto": ``AUTO_LEAD`` where that fits and at most ``LED_ROWS`` rows are
               decoded, else none
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
        lead: Literal["auto"] | int = 0,
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
            NativeTrail(target, adapter, adapter.shape.num_streams)
            if not ride and NativeTrail.fits(target, adapter)
            else None
        )
        self.needs = Taps((adapter.start,) if not ride and adapter.reads_main else ())
        trails = self._native is not None and not prune and adapter.reads_main
        able = lead != 0 and trails and self.tree.options.tree != "product"
        self._lead = Lead.of(target, adapter, self._native) if able and self._native is not None else None
        if lead not in ("auto", 0) and self._lead is None:
            raise CapabilityError(
                "a lead needs streams that trail on the native kernels without pruning, bf16 weights, and tree=best or "
                "tree=chain; use lead=0"
            )
        self._led_rows = LED_ROWS if lead == "auto" else sys.maxsize
        self.lead = 0 if self._lead is None else AUTO_LEAD if lead == "auto" else lead
        self._longest = 0 if self._lead is None else self.lead + self._lead.beyond
        if not ride and self._native is None:
            for index in range(adapter.start, len(target.blocks)):
                block = target.blocks[index]
                assert isinstance(block, Block)
                adapter.layer(index).merge(block)
        parts = (target.blocks[adapter.start :], adapter.layers, *adapter.terms)
        read = read_bytes(parts) + self.tree.head.read
        self._call = Call("partial", len(adapter.layers), len(target.blocks), read)
        o, depth = self.tree.options, self.tree.depth
        self.max_nodes = o.nodes if o.tree == "best" else sum(o.children**d for d in range(depth + 1)) + self._longest

    @property
    def margin(self) -> int:
        """The tree's nodes; if streams trail on the native kernels, at least their positions and those of a lead."""
        return max(self.max_nodes, 0 if self._native is None else self.adapter.shape.num_streams + self._longest)

    @property
    def rider(self) -> Rider | None:
        """The rider, if streams ride in the pass or prune it."""
        return self._rider

    def depth_of(self, budget: int) -> int:
        """The maximum depth of a tree of ``budget`` nodes: its lead, and the streams that the rest of it uses."""
        streams = self._streams_of(min(budget, self.max_nodes) - self.lead)
        return min(budget - 1, self._longest + streams) if self.lead else streams

    def account(self, rows: int) -> str:
        """Drafts with a lead take longer and yield more, so they are judged apart from those without."""
        return f"{self.name}, led" if self._leads(rows) else self.name

    def least(self, rows: int) -> int:
        """Enough nodes to pay for a lead; smaller drafts would also show too little of the streams after it."""
        return min(LED_NODES, self.max_nodes) if self._leads(rows) else 1

    def usual_length(self, rows: int) -> float:
        """With a lead, more than of most drafters."""
        return LED_LENGTH if self._leads(rows) else 0.0

    def copies(self, row: Row) -> bool:
        """Those of greedy rows, if its trees are best-first and built by the native kernels."""
        return self.tree.native is not None and self.tree.native.copies and row.sampling.greedy

    def _leads(self, rows: int) -> bool:
        return self.lead > 0 and rows <= self._led_rows

    def _streams_of(self, budget: int) -> int:
        """The number of streams that a tree of ``budget`` nodes uses."""
        if self.tree.options.tree != "best":
            return self.tree.depth
        return self.tree.options.streams(self.tree.depth, max(2, budget))

    def _ahead(self, rows: Sequence[Row]) -> int:
        """The number of tokens that lead the next drafts of rows."""
        if any(row.rule != "match" for row in rows):
            return 0  # they are judged by the distributions that they were sampled from
        return self.lead if self._leads(len(rows)) else 0

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
        found: dict[int, DraftTree] = {}
        known = [b for b, row in enumerate(rows) if budget > 1 and row.max_depth > 0 and self._state(row).ready]
        batch = [b for b in known if rows[b].rule == "match"]
        left = {b: min(budget, self.max_nodes) - len(self._state(rows[b]).lead) for b in batch}
        for nodes in sorted(set(left.values())):
            places = [b for b in batch if left[b] == nodes]
            for b, tree in zip(places, self._below(places, rows, nodes), strict=True):
                led = _led(rows[b].root, self._state(rows[b]), tree)
                limit = min(rows[b].max_depth, budget - 1)  # deeper than most trees have nodes
                whole = led.size <= 1 + limit or led.max_depth <= limit
                found[b] = led if whole else led.select((led.depths <= limit).nonzero()[0])
        for b in known:
            row, states_SD = rows[b], self._state(rows[b]).states_SD
            if row.rule == "rejection" and states_SD is not None:
                noise = generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE)
                found[b] = self.tree.sample(
                    states_SD, row.root, row.sampling, noise, depth=row.max_depth, row=self._words(row)
                )
        return [found[b] if b in found else DraftTree.root(row.root) for b, row in enumerate(rows)]

    def _below(self, places: Sequence[int], rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The trees of some rows, of ``budget`` nodes, from the streams that trail their roots or leads."""
        kept = [self._state(rows[b]) for b in places]
        roots = [state.lead[-1] if state.lead else rows[b].root for b, state in zip(places, kept, strict=True)]
        states = [state.states_SD for state in kept if state.states_SD is not None]
        if budget < 2 or len(states) < len(kept):
            return [DraftTree.root(root) for root in roots]
        draft = self._sized(budget)
        while draft.depth > min(map(len, states)):  # states were prepared for a smaller tree
            budget = min(budget, draft.options.nodes) - 1
            draft = self._sized(budget)
        drawn = [
            DrawNoise.of(rows[b], draft.depth, ahead=len(state.lead)) for b, state in zip(places, kept, strict=True)
        ]
        words, ahead = [self._words(rows[b]) for b in places], [state.lead for state in kept]
        return draft.build(states, roots, words, drawn, ahead)

    def _state(self, row: Row) -> _State:
        state: _State = row.state[self]
        return state

    def _words(self, row: Row) -> RowVocabulary:
        words = self._state(row).words.extend(row.tokens)
        words.trust = min(1.0, row.beliefs.factor(COPIED, PRIOR))
        return words

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep the stream states of each row's accepted node; not computed if nothing will be drafted."""
        result = seen.result
        last = [result.starts_B[slot] + v.path[-1] for slot, v in zip(seen.slots, seen.verdicts, strict=True)]
        for row in rows:
            row.state[self] = _State(self._state(row).words)
        if seen.budget < 2 or not any(seen.live):
            return
        if self._rider is not None and self._rider.rides:
            assert result.riding_MSD is not None
            served = [row for row, live in zip(rows, seen.live, strict=True) if live]
            tally(Call("heads", read=self.tree.head.read), served)
            for row, at in zip(rows, last, strict=True):
                row.state[self].states_SD = result.riding_MSD[at].clone()
            return
        going = [i for i, live in enumerate(seen.live) if live]
        # streams that start from no main row only need to know how many there are
        main_MD = result.taps[self.adapter.start] if self.adapter.reads_main else result.hidden_MD
        if self._native is None:
            at_B = torch.tensor([last[i] for i in going], device=main_MD.device)
            tokens_B = torch.tensor([rows[i].root for i in going])
            tally(self._call, [rows[i] for i in going])
            states = self._trail(main_MD[at_B].to(self.target.dtype), tokens_B, [seen.slots[i] for i in going], seen)
            for i, states_SD in zip(going, states, strict=True):
                self._state(rows[i]).states_SD = states_SD
        else:
            order = sorted(going, key=seen.slots.__getitem__)
            slots, nodes = [seen.slots[i] for i in order], [last[i] for i in order]
            self._prepare(self._native, [rows[i] for i in order], slots, nodes, main_MD, seen)

    def _prepare(
        self,
        native: NativeTrail,
        rows: Sequence[Row],
        slots: Sequence[int],
        nodes: Sequence[int],
        main_MD: Tensor,
        seen: Observation,
    ) -> None:
        """Prepare the next drafts on the native kernels: the lead, if there is one, and the streams that trail it.

        ``slots`` of the rows ascend, and ``nodes`` are the rows of ``main_MD`` that they trail without a lead.
        """
        budget, count = min(seen.budget, self.max_nodes), self._ahead(rows)
        most = min(budget - 1, self._longest) if count else 0
        led = [
            Led(
                row,
                slot,
                self._words(row),
                DrawNoise.of(row, 2 * self._longest) if most else None,
                row.root,
                main_MD,
                node,
            )
            for row, slot, node in zip(rows, slots, nodes, strict=True)
        ]
        if most and self._lead is not None:
            self._lead.run(led, seen.cache, min(count, most), most)
        for row, lead in zip(rows, led, strict=True):
            self._state(row).lead, self._state(row).log_probs = lead.tokens, lead.log_probs
        for nodes_left in sorted({budget - len(lead.tokens) for lead in led}):
            if nodes_left < 2:
                continue
            same = [i for i, lead in enumerate(led) if budget - len(lead.tokens) == nodes_left]
            states = trailing(native, [led[i] for i in same], seen.cache, self._streams_of(nodes_left))
            for i, states_SD in zip(same, states, strict=True):
                self._state(rows[i]).states_SD = states_SD

    def _trail(self, entry_BD: Tensor, emitted_B: Tensor, slots: Sequence[int], seen: Observation) -> Tensor:
        """Stream states [B, S, D] of committed nodes, from their main rows before layer N - N_s."""
        target, cache = self.target, seen.cache
        lengths = [cache.lengths[slot] for slot in slots]
        together = list(slots) == list(range(len(slots)))
        span, table = max(lengths), target.rope().rotations(cache.capacity).table
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
                cache.capacity,
            )
            return (states[:, 0],)

        key = ("trail", id(self), len(slots), together, span, table.data_ptr())
        inputs = (entry_BD, emitted_B, torch.tensor(lengths), torch.tensor(slots))
        (states,) = cache.graphs.run(target.backend.capture, key, compute, inputs, target.device, held=(table, self))
        return states.clone()


def _led(root: int, state: _State, tree: DraftTree) -> DraftTree:
    """The tree of a row from the one below its lead.

    lead 7 8, tree 8 +-- 1 -- 2         root 5 -- 7 -- 8 +-- 1 -- 2
                     +-- 4                               +-- 4
    """
    count = len(state.lead)
    if not count:
        return tree
    assert tree.log_probs is not None
    sources = [f"{LEAD} {depth}" for depth in range(1, count + 1)]
    return DraftTree(
        np.concatenate(([root], state.lead, tree.tokens[1:])).astype(np.int64),
        np.concatenate((np.arange(-1, count), tree.parents[1:] + count)).astype(np.int64),
        sources=("target", *sources, *tree.sources[1:]),
        log_probs=np.concatenate(([0.0], state.log_probs, tree.log_probs[1:] + state.log_probs[-1])).astype(np.float32),
    )
