"""The drafter of Hydra++: its heads read a prefix layer that has read the target's states of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call, Needs, Observation, Row, tally
from anabranch.methods.heads.drafter import HeadDrafter, HeadState
from anabranch.methods.hydra.draft import HydraDraft
from anabranch.methods.hydra.module import Memory, PrefixLayer
from anabranch.model.passes import PassResult
from anabranch.model.reads import read_bytes

__all__ = ["PrefixDrafter"]


@dataclass
class _Reading(HeadState):
    """The state of a row, with what its prefix layer has read."""

    memory: Memory = field(default_factory=Memory)


class PrefixDrafter(HeadDrafter):
    """Drafts from heads that read a prefix layer.

    A row keeps the keys and values of the layer. States are read when the next draft is prepared: where the load leaves
    no time for drafts, they wait.
    """

    needs = Needs(prompt=True)

    def __init__(self, name: str, tree: HydraDraft) -> None:
        super().__init__(name, tree)
        module, target = tree.module, tree.target
        self._layer = module.shared(target, PrefixLayer, lambda: PrefixLayer(target, module))
        self._call = Call("partial", 1, target.config.num_layers, read_bytes([self._layer.layer]))

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Keep the states of a part of the prompt."""
        self._memory(row).add(result.hidden_MD[result.nodes(0)].clone())

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
