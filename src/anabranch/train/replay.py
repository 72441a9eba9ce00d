"""Predicted mean acceptance length: recorded answers replayed through the real tree builder, without decoding.

Greedy decoding with the rule *follow* walks a draft tree along the target's own tokens. Where these are known
(held-out answers written by the target), the walk needs no target pass of its own: all stream states of an answer come
from one pass, and the tree builder is the one that decoding uses.

    answer  a b c d e f      step 1 emits a (nothing was drafted yet); its streams draft from root a
                             step 2 accepts b c, emits d;  step 3 accepts nothing, emits e;  step 4 emits f
    6 tokens in 4 steps: 1.5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anabranch.streams.draft import StreamDraft
from anabranch.train.data import Batch, Example
from anabranch.train.objective import StreamObjective
from anabranch.tree import DraftTree

__all__ = ["Replay", "replay"]


@dataclass
class Replay:
    """Counts over all replayed answers; ``accepted[a]`` steps accepted a draft tokens."""

    tokens: int = 0
    steps: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step, the target's own next token included."""
        return self.tokens / max(1, self.steps)

    def at_least(self, depth: int) -> float:
        """Share of drafted steps that accepted at least ``depth`` draft tokens."""
        total = sum(self.accepted.values())
        return sum(n for a, n in self.accepted.items() if a >= depth) / max(1, total)


def _matched(tree: DraftTree, wanted: Sequence[int]) -> int:
    """How many of the ``wanted`` tokens the tree holds as a path from the root."""
    node, found = 0, 0
    while found < len(wanted):
        child = next((c for c in tree.children(node) if tree.tokens[c] == wanted[found]), None)
        if child is None:
            break
        node, found = int(child), found + 1
    return found


@torch.no_grad()
def replay(objective: StreamObjective, draft: StreamDraft, examples: Sequence[Example], *, rows: int = 16) -> Replay:
    """Replay ``examples`` with the trees that ``draft`` builds, ``rows`` answers at a time."""
    total = Replay()
    order = sorted(examples, key=len)
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        batch = Batch.of(group)
        frozen = objective.freeze(batch)
        parts = [objective.states(frozen, positions) for positions, _ in objective.segments(batch)]
        states_BPSD = torch.cat(parts, dim=1)
        texts = [(*example.prompt_ids, *example.answer_ids) for example in group]
        starts = batch.starts_B.tolist()
        at = list(starts)  # the last accepted position of each answer
        total.tokens += sum(len(example.answer_ids) for example in group)
        total.steps += len(group)  # the first step of every answer has no draft
        while True:
            active = [b for b in range(len(group)) if at[b] + 2 < len(texts[b])]
            if not active:
                break
            offsets = torch.tensor([at[b] - starts[b] for b in active])
            states = states_BPSD[torch.tensor(active), offsets]
            trees = draft.build(states, [texts[b][at[b] + 1] for b in active])
            for b, tree in zip(active, trees, strict=True):
                wanted = texts[b][at[b] + 2 :]
                found = _matched(tree, wanted)
                total.steps += 1
                total.accepted[found] = total.accepted.get(found, 0) + 1
                source = group[b].source
                seen, steps = total.by_source.get(source, (0, 0))
                total.by_source[source] = (seen + min(found + 1, len(wanted)), steps + 1)
                at[b] += found + 1
    return total
