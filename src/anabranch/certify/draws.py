"""Samples of what follows a context, drawn by the scheduler that serves every other caller; and where to draw them.

V vocabulary, M positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from anabranch.certify.compare import last_logits
from anabranch.control.controller import Controller, Plan
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.decoding.stats import Stats
from anabranch.errors import InputError
from anabranch.methods import Drafter, Row
from anabranch.model.encoder import Source
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams, target_probs
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["LENGTH", "Context", "TopKAsSampled", "choose_contexts", "draw", "sampling_scheduler", "seeds"]

LENGTH = 3  # tokens of a sample
BEHIND = 16  # tokens that could still follow a sample, so that drafts have their usual depth
CERTAIN = 0.95  # a context whose most probable next token exceeds this tells distributions apart too slowly
CHILDREN = 3  # of the wrong rule's trees
WORD = 2**64 - 1


@dataclass(frozen=True)
class Context:
    """A text whose continuations are sampled.

    prompt     the index of the prompt that it continues
    tokens     token ids, the prompt's included
    certainty  the probability of the most probable next token
    """

    prompt: int
    tokens: tuple[int, ...]
    certainty: float


class _Whole(Controller):
    """Verifies every draft as it is, whatever that costs: with many rows, nothing else would be drafted."""

    def __init__(self, *, ragged: bool) -> None:
        super().__init__(Costs(PassCosts(StepCosts((1,), (1.0,)))), ragged=ragged)

    def plan(self, groups: Mapping[Drafter, int], context: float) -> dict[Drafter, Plan]:
        """The largest drafts."""
        return {drafter: Plan(drafter.max_nodes) for drafter in groups}

    def choose(
        self,
        rows: Sequence[Row],
        drafters: Sequence[Drafter],
        trees: Sequence[DraftTree],
        plans: Mapping[Drafter, Plan],
    ) -> list[DraftTree]:
        """All of them."""
        return list(trees)


class TopKAsSampled(Drafter):
    """Wrong on purpose: it proposes the most probable tokens and states that they were sampled.

    *Rejection* then emits the most probable one almost always. Only a share of the rows are drafted for, so that their
    distribution is wrong by a known amount: a test that does not notice lacks the power that it claims.

    probs_V  the target's next-token distribution
    length   of the context: nothing is drafted after longer texts
    wrong    the total variation to err by, if so much is possible
    """

    name, rules, max_nodes = "top-k as sampled", ("match", "rejection"), CHILDREN + 1

    def __init__(self, probs_V: torch.Tensor, length: int, wrong: float) -> None:
        self.probs_V, self.length = probs_V, length
        self.share = wrong / max(wrong, 1.0 - float(probs_V.max()))
        best = probs_V.topk(min(CHILDREN, len(probs_V))).indices
        self.tokens = best[probs_V[best] > 0].tolist()

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The same tree for each row at the context's end whose seed, a uniform 64-bit number, is in the share."""
        return [self._tree(row) for row in rows]

    def _tree(self, row: Row) -> DraftTree:
        if len(row.tokens) != self.length or row.sampling.seed >= self.share * 2**64:
            return DraftTree.root(row.root)
        parents = np.array([-1, *[0] * len(self.tokens)], np.int64)
        return DraftTree(np.array([row.root, *self.tokens], np.int64), parents, draft_probs=self.probs_V[None])


def seeds(seed: int, arm: int, context: int, count: int) -> list[int]:
    """Seeds of independent samples, different for every arm and context."""
    numbers: list[int] = np.random.SeedSequence([seed & WORD, arm, context]).generate_state(count, np.uint64).tolist()
    return numbers


def sampling_scheduler(target: Target, rows: int) -> Scheduler:
    """A scheduler for ``draw``: ``rows`` samples at a time, which join as others leave, and whole drafts.

    Of texts that ended nothing is kept: rows in use have the context.
    """
    return Scheduler(target.decoder, rows=rows, controller=_Whole(ragged=target.decoder.ragged), prefix_bytes=1)


def draw(
    scheduler: Scheduler,
    drafter: Drafter,
    context: Sequence[int],
    sampling: SamplingParams,
    *,
    rule: Rule,
    seeds: Iterable[int],
    source: Source | None = None,
) -> tuple[Counter[tuple[int, ...]], Stats]:
    """Sample the first ``LENGTH`` tokens after a context once with each seed; and the statistics of all steps."""
    first = Request(context, LENGTH + BEHIND, sampling, rule=rule, source=source)
    requests = (replace(first, sampling=replace(sampling, seed=seed)) for seed in seeds)
    tickets = [scheduler.submit(request, drafter) for request in requests]
    stats = Stats()
    with scheduler.target.inference():
        while scheduler.busy:
            for ticket, step in scheduler.tick():
                stats.add(step)
                ticket.steps.clear()  # trees to be verified by rejection are large
                if len(ticket.emitted) >= LENGTH:
                    scheduler.cancel(ticket)
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error
    return Counter(tuple(ticket.emitted[:LENGTH]) for ticket in tickets), stats


def choose_contexts(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
) -> list[Context]:
    """One context of each prompt: so many sampled tokens after it, at most those of its request, where the test can
    see most.

    That is where the drafter proposes something, if it does anywhere, and the target's most probable next token has a
    probability closest to 1/2. Prompts after which the target is nearly certain of every token have none.

    Raises InputError if no prompt has one, and what ``Scheduler.submit`` raises.
    """
    scheduler = sampling_scheduler(target, 1)
    tickets = [scheduler.submit(request, drafter) for request in requests]
    contexts = []
    for index, ticket in enumerate(tickets):
        text, places = list(ticket.request.prompt_ids), []
        start = len(text)
        for step in scheduler.steps(ticket):
            if step.drafted:
                places.append(len(text))
            text += step.tokens
        context = _most_open(target, index, text, start, places or range(start, len(text)), ticket.request)
        if context is not None:
            contexts.append(context)
    if not contexts:
        raise InputError(
            "the target is nearly certain of every next token after these prompts, so samples cannot tell "
            "distributions apart; raise the temperature or give other prompts"
        )
    return contexts


def _most_open(
    target: Target, prompt: int, text: list[int], start: int, places: Iterable[int], request: Request
) -> Context | None:
    """The context that ends at one of ``places``, with a most probable next token closest to 1/2."""
    logits_MV = last_logits(target, text, len(text) - start + 1, prompt=start, source=request.source)
    histories = [text[:end] for end in range(start, len(text) + 1)]
    certain_M = target_probs(logits_MV, request.sampling, histories).amax(dim=-1).tolist()
    longest = target.config.max_positions - LENGTH
    able = [place for place in places if place <= longest and certain_M[place - start] <= CERTAIN]
    if not able:
        return None
    best = min(able, key=lambda place: abs(certain_M[place - start] - 0.5))
    return Context(prompt, tuple(text[:best]), float(certain_M[best - start]))
