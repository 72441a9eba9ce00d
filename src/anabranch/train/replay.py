"""Predicted mean acceptance length: recorded answers replayed through the real tree builder, without decoding.

Greedy decoding with the rule *matching* walks a draft tree along the target's own tokens. Where these are known
(held-out answers written by the target), the walk needs no target pass of its own: all stream states of an answer come
from one pass, and the tree builder is the one that decoding uses.

    answer  a b c d e f      step 1 emits a (nothing was drafted yet); its streams draft from root a
                             step 2 accepts b c, emits d;  step 3 accepts nothing, emits e;  step 4 emits f
    6 tokens in 4 steps: 1.5

B rows of the batch, P positions from the last prompt token on, S streams, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.methods.streams.draft import RowVocabulary, StreamDraft
from anabranch.train.data import Batch, Example
from anabranch.train.objective import StreamObjective
from anabranch.tree import DraftTree

__all__ = ["Accuracy", "Replay", "evaluate", "replay"]

CHUNK = 1024  # predictions that are scored at once


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


@dataclass
class Accuracy:
    """How often a stream's best token, and one of its ``top`` best, is the text's, given the true path to it."""

    top: int
    first_S: Tensor
    among_S: Tensor
    count_S: Tensor

    def shares(self) -> tuple[list[float], list[float]]:
        """Of the best token and of the ``top`` best, by stream."""
        count_S = self.count_S.clamp(min=1)
        return (self.first_S / count_S).tolist(), (self.among_S / count_S).tolist()


@dataclass(frozen=True)
class _Recorded:
    """A group of answers with the stream states of all their positions."""

    group: Sequence[Example]
    batch: Batch
    states_BPSD: Tensor
    real_BP: Tensor


def _record(objective: StreamObjective, examples: Sequence[Example], rows: int) -> Iterator[_Recorded]:
    """``rows`` answers at a time, alike in length."""
    order = sorted(examples, key=len)
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        batch = Batch.of(group)
        frozen, device = objective.freeze(batch), objective.target.device
        segments = list(objective.segments(batch))
        states = [objective.states(frozen, batch.tokens_BT.to(device), positions) for positions, _ in segments]
        yield _Recorded(group, batch, torch.cat(states, dim=1), torch.cat([real for _, real in segments], dim=1))


def _matched(tree: DraftTree, wanted: Sequence[int]) -> int:
    """How many of the ``wanted`` tokens the tree holds as a path from the root."""
    node, found = 0, 0
    while found < len(wanted):
        child = next((c for c in tree.children(node) if tree.tokens[c] == wanted[found]), None)
        if child is None:
            break
        node, found = int(child), found + 1
    return found


def _walk(total: Replay, recorded: _Recorded, draft: StreamDraft) -> None:
    """Decode a group of answers by the book and add what happened to ``total``."""
    group = recorded.group
    texts = [(*example.prompt_ids, *example.answer_ids) for example in group]
    starts = recorded.batch.starts_B.tolist()
    words = [RowVocabulary(draft) for _ in group]
    at = list(starts)  # the last accepted position of each answer
    total.tokens += sum(len(example.answer_ids) for example in group)
    total.steps += len(group)  # the first step of every answer has no draft
    while active := [b for b in range(len(group)) if at[b] + 2 < len(texts[b])]:
        offsets = torch.tensor([at[b] - starts[b] for b in active])
        states = recorded.states_BPSD[torch.tensor(active), offsets]
        own = [words[b].extend(texts[b][: at[b] + 2]) for b in active]
        trees = draft.build(states, [texts[b][at[b] + 1] for b in active], own)
        for b, tree in zip(active, trees, strict=True):
            wanted = texts[b][at[b] + 2 :]
            found = _matched(tree, wanted)
            total.steps += 1
            total.accepted[found] = total.accepted.get(found, 0) + 1
            seen, steps = total.by_source.get(group[b].source, (0, 0))
            total.by_source[group[b].source] = (seen + min(found + 1, len(wanted)), steps + 1)
            at[b] += found + 1


def _score(total: Accuracy, recorded: _Recorded, objective: StreamObjective) -> None:
    """Add the ranks of the text's own tokens to ``total``, over the vocabulary that training scores them with."""
    device = recorded.states_BPSD.device
    batch, words = recorded.batch, objective.vocabulary(recorded.batch)
    tokens_BT, lengths_B = batch.tokens_BT.to(device), batch.lengths_B.to(device)
    steps = torch.arange(recorded.real_BP.shape[1], device=device)
    positions_BP = torch.where(recorded.real_BP, batch.starts_B.to(device)[:, None] + steps, 0)
    told_BPSD = objective.conditioned(recorded.states_BPSD, tokens_BT, positions_BP)
    top = min(total.top, len(words.head_VD))
    for j in range(told_BPSD.shape[2]):
        index_BP = positions_BP + 2 + j
        inside_BP = recorded.real_BP & (index_BP < lengths_B[:, None])
        wanted_M = words.place[tokens_BT.gather(1, index_BP.clamp(max=tokens_BT.shape[1] - 1))[inside_BP]]
        states_MD = told_BPSD[:, :, j][inside_BP]
        total.count_S[j] += len(wanted_M)
        for first in range(0, len(wanted_M), CHUNK):
            part = slice(first, first + CHUNK)
            # the logit soft cap keeps the order, so ranks need no cap
            scores = F.linear(states_MD[part].to(words.head_VD.dtype), words.head_VD, words.bias_V)
            hit = scores.topk(top, dim=-1).indices == wanted_M[part, None]
            total.first_S[j] += int(hit[:, 0].sum())
            total.among_S[j] += int(hit.any(-1).sum())


@torch.no_grad()
def replay(objective: StreamObjective, draft: StreamDraft, examples: Sequence[Example], *, rows: int = 16) -> Replay:
    """Replay ``examples`` with the trees that ``draft`` builds, ``rows`` answers at a time."""
    total = Replay()
    for recorded in _record(objective, examples, rows):
        _walk(total, recorded, draft)
    return total


@torch.no_grad()
def evaluate(
    objective: StreamObjective,
    drafts: Mapping[str, StreamDraft],
    examples: Sequence[Example],
    *,
    top: int = 8,
    rows: int = 16,
) -> tuple[dict[str, Replay], Accuracy]:
    """Replay ``examples`` with each of ``drafts`` and count right predictions by stream, in one target pass for all."""
    totals = {name: Replay() for name in drafts}
    zeros = torch.zeros(objective.adapter.config.num_streams)
    accuracy = Accuracy(top, zeros, zeros.clone(), zeros.clone())
    for recorded in _record(objective, examples, rows):
        for name, draft in drafts.items():
            _walk(totals[name], recorded, draft)
        _score(accuracy, recorded, objective)
    return totals, accuracy
