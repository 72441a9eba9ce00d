"""Trees from Hydra's heads, level by level: a node's children are scored given the path to it; Hydra++'s drafter.

B rows of the batch, F nodes of a level that get children, C embeddings of a path, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call, Needs, Observation, Row, tally
from anabranch.drafting.grow_tensors import grow_tensors, trees_of
from anabranch.drafting.kept import Family, Kept
from anabranch.methods.heads.drafter import Best, HeadDraft, HeadDrafter, HeadSettings, HeadState
from anabranch.methods.hydra.module import HydraModule, Memory, PrefixLayer
from anabranch.model.cache import shared_length
from anabranch.model.decoder import Decoder
from anabranch.model.pack import read_bytes
from anabranch.model.passes import PassResult
from anabranch.tree import DraftTree

__all__ = ["HydraDraft", "PrefixDrafter"]

FRONTIER = 12  # nodes of a level that get children in a best-first tree; bounds the cost of a level


class HydraDraft(HeadDraft):
    """Builds trees for one target and module."""

    trees = ("best", "chain", "product")

    def __init__(self, target: Decoder, module: HydraModule, settings: HeadSettings | None = None) -> None:
        super().__init__(target, module, settings)
        self.target, self.module = target, module
        module.pack(target)
        # the heads' blocks, and what each of them scores, one after another
        scored = self.heads.read * (1 if self.heads.shared is None else module.config.num_heads)
        self.call = Call("heads", read=read_bytes([module.blocks]) + scored)

    def states(self, hidden_BD: Tensor) -> Tensor:
        """Input of the heads [B, 1, D]."""
        return hidden_BD[:, None]

    def _grow(
        self, states_BSD: Tensor, roots: list[int], best: Best, budget: int, depths: Sequence[int]
    ) -> list[DraftTree]:
        path_BFC = states_BSD.new_zeros(len(roots), 1, 0)

        def expand(d: int, tokens_BF: Tensor, above_BF: Tensor | None) -> tuple[Tensor, Tensor]:
            nonlocal path_BFC
            if above_BF is not None:
                path_BFC = path_BFC.gather(1, above_BF[:, :, None].expand(-1, -1, path_BFC.shape[-1]))
            path_BFC = torch.cat((path_BFC, self.module.embed(self.target, tokens_BF).to(path_BFC.dtype)), dim=-1)
            return best(self.module.states(d, states_BSD, path_BFC), slice(d, d + 1))

        levels = grow_tensors(
            torch.tensor(roots, device=states_BSD.device),
            expand,
            depth=max(depths),
            budget=budget if self.settings.kind == "best" else None,
            frontier=FRONTIER,
            lazy=states_BSD.device.type == "cpu",
        )
        trees = zip(trees_of(roots, levels, "head", budget), depths, strict=True)
        return [t if t.max_depth <= limit else t.select((t.depths <= limit).nonzero()[0]) for t, limit in trees]


@dataclass
class _Reading(HeadState):
    """The state of a row, with what its prefix layer has read."""

    memory: Memory = field(default_factory=Memory)


class PrefixDrafter(HeadDrafter):
    """Drafts from heads that read a prefix layer, which has read the target's states of the whole text (Hydra++).

    A row keeps the keys and values of the layer. States are read when the next draft is prepared: where the load leaves
    no time for drafts, they wait.
    """

    def __init__(self, name: str, tree: HydraDraft) -> None:
        super().__init__(name, tree)
        module, target = tree.module, tree.target
        self._layer = module.shared(target, PrefixLayer, lambda: PrefixLayer(target, module))
        self._call = Call("partial", 1, target.config.num_layers, read_bytes([self._layer.layer]))
        self.needs = Needs(prompt=True, recalls=lambda tokens, _: shared_length(self._layer.recalled[0], tokens[:-1]))

    def recall(self, tokens: Sequence[int], kept: Kept, family: Family) -> None:
        """Take in the kept keys and values of the layer."""
        memory, cache = Memory(), self._layer.new_cache(len(tokens))
        count = kept.copy(family._replace(drafts=self._layer.fingerprint), tokens[:-1], cache, 0)
        if count:
            memory.append(*(part[0].transpose(0, 1) for part in cache.taken(0, 0, count)))
        self._layer.recalled = tokens[:count], memory

    def keep(self, row: Row, length: int, kept: Kept, family: Family) -> None:
        """Keep the keys and values of the layer, as far as states were read."""
        memory = self._memory(row)
        length = min(length, memory.length)
        cache = self._layer.new_cache(max(1, memory.length))
        memory.put(cache)
        kept.keep(family._replace(drafts=self._layer.fingerprint), row.tokens[:length], cache, 0)

    def join(self, row: Row) -> None:
        """A row begins with what was recalled of its prompt."""
        super().join(row)
        count, state = self.needs.recalled(row.tokens, row.lora), row.state[self]
        if count:
            state.memory = self._layer.recalled[1]
            state.memory.rewind(count)
        self._layer.recalled = (), Memory()

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Keep the states of a part of the prompt."""
        memory = self._memory(row)
        if not memory.waiting:
            memory.rewind(start)
        memory.add(result.hidden_MD[result.nodes(0)].clone())

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep the states of the nodes that were accepted, and read them before the next draft."""
        for row, slot, verdict in zip(rows, seen.slots, seen.verdicts, strict=True):
            first = seen.result.starts_B[slot]
            nodes = torch.tensor([first + node for node in verdict.path], device=seen.result.hidden_MD.device)
            self._memory(row).add(seen.result.hidden_MD[nodes])
        super().observe(rows, seen)

    def _read_by_heads(self, rows: Sequence[Row], last_BD: Tensor) -> Tensor:
        tally(self._call, rows)
        return self._layer.read([self._memory(row) for row in rows])

    def _fresh(self) -> HeadState:
        return _Reading(self.tree.row())

    def _memory(self, row: Row) -> Memory:
        state: _Reading = row.state[self]
        return state.memory
