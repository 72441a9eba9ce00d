"""Predict the mean acceptance length by replaying completions with the real drafting code, without decoding.

With the rule *match*, greedy decoding follows the target's own tokens through a draft tree. If these are known
(held-out completions written by the target), this needs no forward pass of the target.

    completion  a b c d e f      step 1 emits a (there is no draft yet); the next draft starts from root a
                                 step 2 accepts b c, emits d;  step 3 accepts nothing, emits e;  step 4 emits f
    6 tokens in 4 steps: 1.5

``replay_all`` is for methods whose drafts follow from states that one pass over the text gives, such as streams and
heads; ``replay_drafter`` for drafters that read the text themselves.

B rows of the batch, P positions from the last prompt token on, S states a position, J predictors, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from anabranch.drafting.drafter import Drafter, Row
from anabranch.drafting.head import RowVocabulary
from anabranch.learning.examples import Batch, Example, grouped
from anabranch.learning.loss import Vocabulary, hits
from anabranch.learning.objective import Objective
from anabranch.model.decoder import Decoder
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree

__all__ = [
    "Accuracy",
    "Builder",
    "Replay",
    "StatePredictions",
    "evaluation",
    "replay",
    "replay_all",
    "replay_drafter",
    "walk",
]

F = TypeVar("F")
TOP = 8  # accuracy counts a token among that many best, too
# (rows, position of the last accepted token of each row) -> the trees drafted after these positions
Propose = Callable[[Sequence[int], Sequence[int]], list[DraftTree]]


@dataclass
class Replay:
    """Counts over all replayed completions; ``accepted[a]`` steps accepted a draft tokens.

    ``by_source`` has tokens and steps, without the first step of each completion.
    """

    tokens: int = 0
    steps: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step, the target's own next token included."""
        return self.tokens / max(1, self.steps)

    def at_least(self, depth: int) -> float:
        """The fraction of drafted steps that accepted at least ``depth`` draft tokens."""
        total = sum(self.accepted.values())
        return sum(n for a, n in self.accepted.items() if a >= depth) / max(1, total)


@dataclass
class Accuracy:
    """Counts of predictions that rank the text's token first, or among the ``top`` first, given the true path to it."""

    top: int
    first_J: Tensor
    among_J: Tensor
    count_J: Tensor

    @staticmethod
    def empty(predictors: int, top: int = TOP) -> Accuracy:
        """Nothing counted yet."""
        return Accuracy(top, *(torch.zeros(predictors) for _ in range(3)))

    def add(self, predictor: int, words: Vocabulary, states_MD: Tensor, tokens_M: Tensor) -> None:
        """Count predictions from some states; ``tokens_M`` are the text's, as rows of ``words``."""
        first, among = hits(words, states_MD, tokens_M, min(self.top, len(words.head_VD)))
        for counts_J, count in ((self.first_J, first), (self.among_J, among), (self.count_J, len(tokens_M))):
            counts_J[predictor] += count

    def shares(self) -> tuple[list[float], list[float]]:
        """The accuracy of the best token and of the ``top`` best, by predictor."""
        count_J = self.count_J.clamp(min=1)
        return (self.first_J / count_J).tolist(), (self.among_J / count_J).tolist()


def matched(tree: DraftTree, wanted: Sequence[int]) -> int:
    """Count the ``wanted`` tokens that are a path of the tree, from the root on."""
    node, length = 0, 0
    while length < len(wanted):
        child = next((c for c in tree.children(node) if tree.tokens[c] == wanted[length]), None)
        if child is None:
            break
        node, length = int(child), length + 1
    return length


def walk(total: Replay, group: Sequence[Example], propose: Propose) -> None:
    """Replay several completions in parallel and add the counts to ``total``."""
    texts = [(*example.prompt_ids, *example.answer_ids) for example in group]
    at = [len(example.prompt_ids) - 1 for example in group]  # the last accepted position of each row
    total.tokens += sum(len(example.answer_ids) for example in group)
    total.steps += len(group)  # the first step of every completion has no draft
    while active := [b for b in range(len(group)) if at[b] + 2 < len(texts[b])]:
        for b, tree in zip(active, propose(active, [at[b] for b in active]), strict=True):
            wanted = texts[b][at[b] + 2 :]
            accepted = matched(tree, wanted)
            total.steps += 1
            total.accepted[accepted] = total.accepted.get(accepted, 0) + 1
            seen, steps = total.by_source.get(group[b].source, (0, 0))
            total.by_source[group[b].source] = (seen + min(accepted + 1, len(wanted)), steps + 1)
            at[b] += accepted + 1


def evaluation(totals: dict[str, Replay], accuracy: Accuracy, depth: int) -> dict[str, Any]:
    """The result of ``Objective.evaluate`` from replays by name, "tree" among them; ``depth`` is the maximum depth."""
    first, among = accuracy.shares()
    tree = totals["tree"]
    return {
        **{name: round(total.mean_acceptance_length, 4) for name, total in totals.items()},
        "top 1": [round(share, 4) for share in first],
        f"top {accuracy.top}": [round(share, 4) for share in among],
        "at least": [round(tree.at_least(d), 4) for d in range(1, depth + 1)],
        "by source": {name: round(tokens / steps, 3) for name, (tokens, steps) in sorted(tree.by_source.items())},
    }


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
    for group, batch in grouped(examples, rows):
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
        total.add(j, words, given_BPJD[:, :, j][inside_BP], wanted_M)


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
    accuracy = Accuracy.empty(objective.predictors, top)
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
