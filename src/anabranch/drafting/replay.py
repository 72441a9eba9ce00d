"""Replay completions through the tree builder of decoding, with the draft states of all positions from one pass.

For methods whose drafts follow from states that one pass over the text gives, such as streams and heads.

B rows of the batch, P positions from the last prompt token on, S states a position, J predictors, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from anabranch.drafting.drafter import Drafter, Row
from anabranch.drafting.head import RowVocabulary
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary, hits
from anabranch.learning.objective import Objective
from anabranch.learning.replay import Accuracy, Replay, walk
from anabranch.model.decoder import Decoder
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree

__all__ = ["Builder", "StatePredictions", "replay", "replay_all", "replay_drafter"]

F = TypeVar("F")
TOP = 8  # accuracy counts a token among that many best, too


class StatePredictions(Objective[F], Protocol[F]):
    """The part of an objective that a replay reads."""

    target: Decoder

    def vocabularies(self, batch: Batch) -> Sequence[Vocabulary]:
        """Vocabulary of each predictor [J], with the batch's own tokens where rows add theirs."""

    def states(self, frozen: F, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """The states [B, P, S, D] that drafts after some positions are built from."""

    def conditioned(self, states_BPSD: Tensor, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """The predictors' states [B, P, J, D], given the true tokens on the path to each prediction."""


class Builder(Protocol):
    """Builds draft trees from states."""

    def row(self) -> RowVocabulary | None:
        """The own tokens of a new row; None if its drafts have the draft vocabulary only."""

    def build(
        self, states_BSD: Tensor, roots: list[int], rows: Sequence[RowVocabulary] | None = None
    ) -> list[DraftTree]:
        """One tree per row from its states and its root token."""


@dataclass(frozen=True)
class _Recorded:
    """A group of completions with the draft states of all positions."""

    group: Sequence[Example]
    batch: Batch
    states_BPSD: Tensor
    real_BP: Tensor


def _record(objective: StatePredictions[Any], examples: Sequence[Example], rows: int) -> Iterator[_Recorded]:
    """``rows`` completions at a time, alike in length."""
    order = sorted(examples, key=len)
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        batch = Batch.of(group)
        frozen, device = objective.freeze(batch), objective.target.device
        segments = list(objective.segments(batch))
        states = [objective.states(frozen, batch.tokens_BT.to(device), positions) for positions, _ in segments]
        yield _Recorded(group, batch, torch.cat(states, dim=1), torch.cat([real for _, real in segments], dim=1))


def _walk(total: Replay, recorded: _Recorded, draft: Builder) -> None:
    texts = [(*example.prompt_ids, *example.answer_ids) for example in recorded.group]
    starts = recorded.batch.starts_B.tolist()
    words = [own for _ in texts if (own := draft.row()) is not None]

    def propose(active: Sequence[int], at: Sequence[int]) -> list[DraftTree]:
        offsets = torch.tensor([position - starts[b] for b, position in zip(active, at, strict=True)])
        states = recorded.states_BPSD[torch.tensor(active), offsets]
        seen = [texts[b][: position + 2] for b, position in zip(active, at, strict=True)]
        own = [words[b].extend(text) for b, text in zip(active, seen, strict=True)] if words else None
        return draft.build(states, [text[-1] for text in seen], own)

    walk(total, recorded.group, propose)


def _score(total: Accuracy, recorded: _Recorded, objective: StatePredictions[Any]) -> None:
    """Add the ranks of the text's own tokens to ``total``, over the vocabulary that training scores them with."""
    device = recorded.states_BPSD.device
    batch = recorded.batch
    tokens_BT, lengths_B = batch.tokens_BT.to(device), batch.lengths_B.to(device)
    steps = torch.arange(recorded.real_BP.shape[1], device=device)
    positions_BP = torch.where(recorded.real_BP, batch.starts_B.to(device)[:, None] + steps, 0)
    given_BPJD = objective.conditioned(recorded.states_BPSD, tokens_BT, positions_BP)
    for j, words in enumerate(objective.vocabularies(batch)):
        index_BP = positions_BP + 2 + j
        inside_BP = recorded.real_BP & (index_BP < lengths_B[:, None])
        wanted_M = words.place[tokens_BT.gather(1, index_BP.clamp(max=tokens_BT.shape[1] - 1))[inside_BP]]
        first, among = hits(words, given_BPJD[:, :, j][inside_BP], wanted_M, min(total.top, len(words.head_VD)))
        total.first_S[j] += first
        total.among_S[j] += among
        total.count_S[j] += len(wanted_M)


@torch.no_grad()
def replay(objective: StatePredictions[Any], draft: Builder, examples: Sequence[Example], *, rows: int = 16) -> Replay:
    """Replay ``examples`` with the trees that ``draft`` builds, ``rows`` completions at a time."""
    total = Replay()
    for recorded in _record(objective, examples, rows):
        _walk(total, recorded, draft)
    return total


@torch.no_grad()
def replay_all(
    objective: StatePredictions[Any],
    drafts: Mapping[str, Builder],
    examples: Sequence[Example],
    *,
    top: int = TOP,
    rows: int = 16,
) -> tuple[dict[str, Replay], Accuracy]:
    """Replay ``examples`` with each of ``drafts`` and count correct predictions by predictor, with one target pass."""
    totals = {name: Replay() for name in drafts}
    accuracy = Accuracy.empty(top, objective.predictors)
    for recorded in _record(objective, examples, rows):
        for name, draft in drafts.items():
            _walk(totals[name], recorded, draft)
        _score(accuracy, recorded, objective)
    return totals, accuracy


def replay_drafter(
    total: Replay,
    group: Sequence[Example],
    drafter: Drafter,
    depth: int,
    advance: Callable[[Row, int, int], None] = lambda row, number, position: None,
) -> None:
    """Replay some completions with a drafter that reads the texts itself, greedily.

    depth    maximum depth of its trees
    advance  called before each draft with a row, its number, and the position of its last accepted token
    """
    texts = [[*example.prompt_ids, *example.answer_ids] for example in group]
    rows = [Row(text, len(text), SamplingParams(), max_depth=depth) for text in texts]
    for row in rows:
        drafter.join(row)

    def propose(active: Sequence[int], at: Sequence[int]) -> list[DraftTree]:
        for b, position in zip(active, at, strict=True):
            rows[b].tokens = texts[b][: position + 2]
            advance(rows[b], b, position)
        return drafter.draft([rows[b] for b in active], drafter.max_nodes)

    walk(total, group, propose)
