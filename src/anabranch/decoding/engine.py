"""The decoding loop. There is one, for every method, batch and sampling rule.

    draft    the drafters propose a tree a row, and the load decides how much of it is verified
    forward  one pass of the target over all rows' trees
    verify   which path the target accepts, and its own next token
    commit   keep the accepted nodes in the KV cache
    observe  the drafters see what happened, and prepare what they will draft next

A row's root is its last committed token, which is not in the cache yet: the pass that verifies a draft computes the
root's keys and values too. So the cache holds one token less than the text, and plain decoding is a tree of one node.

Rows join and leave in ``batch``; ``scores`` asks the target what it says at each node. The engine knows token ids; text
belongs to ``generation``, and who decodes when to ``scheduler``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from anabranch.control.controller import Controller, Plan
from anabranch.control.costs import costs_of
from anabranch.decoding.batch import Batch, FinishReason, Member, Request, takes_loras
from anabranch.decoding.guided import guided
from anabranch.decoding.scores import Scores
from anabranch.drafting.combined import ChoiceDrafter
from anabranch.drafting.drafter import Call, DeviceDrafter, Drafter, Observation, ProbingDrafter
from anabranch.errors import NumericsError
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import DeviceTrees, Inputs
from anabranch.model.pack import weight_bytes
from anabranch.model.passes import Need, PassResult
from anabranch.tree import DraftTree
from anabranch.verify import Verdict

__all__ = ["Engine", "FinishReason", "Request", "Step", "Timings"]


class Timings(NamedTuple):
    """Seconds of one step by part, for all its rows together; prepare: what drafters do after it for the next draft."""

    draft: float
    forward: float
    verify: float
    commit: float
    prepare: float

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self)


class Step(NamedTuple):
    """Outcome of one target pass for one row, with the drafters' own passes before and after it.

    tokens     emitted, in order; the last is the target's own unless the row was cut before it
    sources    who proposed each of them; "target" for the target's own
    tree       what was verified (after pruning); ``drafted`` nodes were proposed before it
    log_probs  the target's raw log probability of each token, where asked for
    finish     set on the last step of a row
    read       prompt tokens that its pass read; the timings are without their share
    calls      the forward passes of the step: the target's, and those that drafters ran
    """

    row: int
    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    tree: DraftTree
    drafted: int
    verdict: Verdict
    timings: Timings
    log_probs: tuple[float, ...] | None = None
    finish: FinishReason | None = None
    read: int = 0
    calls: tuple[Call, ...] = ()
    top_log_probs: tuple[dict[int, float], ...] | None = None


class Engine(Batch):
    """Decodes a batch: up to ``rows`` sequences at a time, each of at most ``capacity`` tokens, prompt included.

    controller  sizes the drafts of adaptive drafters; None: one of the engine's own

    The other arguments are those of ``Batch``.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None = None,
        *,
        rows: int = 1,
        capacity: int = 2048,
        longest: int | None = None,
        margin: int = 1,
        controller: Controller | None = None,
        on_leave: Callable[[Member, int], None] | None = None,
    ) -> None:
        super().__init__(
            target, drafter, rows=rows, capacity=capacity, longest=longest, margin=margin, on_leave=on_leave
        )
        self._controller = controller
        self._plans: dict[Drafter, Plan] = {}
        self._prepared = 0.0  # seconds that preparing the next step's drafts took
        self._call: Call | None = None

    @property
    def controller(self) -> Controller:
        """The controller; its costs are measured when it is first needed."""
        if self._controller is None:
            self._controller = Controller(costs_of(self.target), ragged=self.target.ragged)
        return self._controller

    @property
    def call(self) -> Call:
        """A pass of the target; the bytes are added up when they are first asked for."""
        if self._call is None:
            layers = self.target.config.num_layers
            self._call = Call("target", layers, layers, weight_bytes(self.target))
        return self._call

    def use(self, controller: Controller) -> None:
        """Leave adaptive drafts to another controller."""
        self._controller = controller

    @property
    def learned(self) -> Controller | None:
        """The controller, if it was needed so far."""
        return self._controller

    def join(self, request: Request, drafter: Drafter | None = None, *, known: int = 0, rides: bool = False) -> int:
        """As ``Batch.join``, with one of several drafters to choose from."""
        joining = self.choose_drafter(drafter or self.drafter, request)
        row = super().join(request, joining, known=known, rides=rides)
        if self._controller is not None:
            self._controller.joined(joining, sum(member.drafter is joining for member in self._members))
        return row

    def choose_drafter(self, drafter: Drafter, request: Request, rows: int = 0) -> Drafter:
        """The drafter of a row that joins now with a request: ``drafter``, or one of those that it stands for.

        rows  the rows that will soon be in use, if more than now
        """
        if not isinstance(drafter, ChoiceDrafter):
            return drafter
        others = [member.drafter for member in self._members]
        served = [each for each in drafter.drafters if request.lora is None or takes_loras(each)]
        able = [each for each in served if not others or self.rider_of(each) is self.rider_of(others[0])]
        if not able:
            return served[0]  # it waits, as any of them would
        using = next((other for other in reversed(others) if other in able), None)
        rows = max(rows, self.active + 1)
        return self.controller.choose_drafter(able, rows, _context(self._members), using=using)

    def rehearse(self, request: Request) -> None:
        """Decode ``request`` as often as its shapes must occur to be captured as graphs, before it is timed."""
        for _ in range(0 if self.target.backend.capture is None else 2):
            self.add(request)
            for _ in self.run():
                pass

    # -- the loop ----------------------------------------------------------------------------------------
    def run(self) -> Iterator[Step]:
        """Steps of all rows until none is left."""
        while self._members:
            yield from self.step()

    def step(self) -> list[Step]:
        """One target pass for all rows whose prompts are read; rows that are done leave.

        Raises NumericsError where the target's scores are not finite numbers; all rows leave then.
        """
        self.at_fault = None
        self.make_room()
        self._fit_prompts()
        members = self._members[: self._ready]
        if not members:
            return []
        with self.target.inference():
            limit = self.target.rope().reread_after
            for slot, member in enumerate(members):
                if limit is not None and self.cache.prompts[slot] <= limit < len(member.row.tokens):
                    self._read_again(slot)
            return self._step(members)

    def _fit_prompts(self) -> None:
        """Read the rest of a prompt first if the cache has no room to feed it together with the row's draft."""
        members = self._members[: self._ready]
        if not any(member.unread for member in members):
            return
        width = max(member.unread + member.drafter.margin for member in members)
        if max(self.cache.lengths[: self._ready]) + width > self.cache.capacity:
            for slot in reversed(range(len(members))):
                if members[slot].unread:
                    self._postpone(slot)

    def _step(self, members: list[Member]) -> list[Step]:
        began = time.perf_counter()
        self._bound_depth(members)
        grown = self._draft_on_device(members)
        trees, drafted = self._draft(members) if grown is None else ([], [])
        probes = self._probes(members)
        after_draft = time.perf_counter()
        prefill = [member.unread for member in members]
        result = self._forward(members, grown or trees, probes)
        if grown is not None:
            trees = grown.trees
            drafted = [tree.size - 1 for tree in trees]
        trees = result.pruned(trees)
        scores = Scores(self.target, members, result)
        after_forward = time.perf_counter()
        verdicts = []
        for b, (member, tree) in enumerate(zip(members, trees, strict=True)):
            self.at_fault = member.row.id
            verdicts.append(scores.verdict(b, tree))
        self.at_fault = None
        probed = [scores.probed(b, trees[b].size, probe) for b, probe in enumerate(probes)]
        after_verify = time.perf_counter()
        wrong = [member.row.id for member, verdict in zip(members, verdicts, strict=True) if verdict.next_token < 0]
        if wrong:
            self.at_fault = wrong[0] if len(wrong) < len(members) else None
            self._refuse_numbers()

        paths: list[Sequence[int]] = [verdict.path for verdict in verdicts]
        if read := sum(prefill):
            paths = [[*range(n), *(n + node for node in path)] for n, path in zip(prefill, paths, strict=True)]
            for member, more in zip(members, prefill, strict=True):
                member.read += more
        self.cache.commit(paths, moved=result.verdicts is not None)
        emitted = [self._emit(*each) for each in zip(members, trees, verdicts, strict=True)]
        after_commit = time.perf_counter()
        nodes = sum(result.counts_B)
        forward = (after_forward - after_draft) * nodes / (nodes + read)
        if not read and any(member.drafter.adaptive for member in members):
            self.controller.saw_step(
                nodes if self.controller.ragged else len(members) * max(result.counts_B),
                len(members),
                _context(members),
                tokens=sum(len(said) for said, _ in emitted),
                pass_ms=1e3 * forward,
                other_ms=1e3 * (after_commit - began - forward + self._prepared),
            )
        self._observe(members, result, trees, verdicts, probed)
        done = time.perf_counter()
        self._prepared = done - after_commit
        timings = Timings(
            *(after_draft - began, forward, after_verify - after_forward, after_commit - after_verify, self._prepared)
        )
        steps, shared = [], self.call.shared(len(members))
        for b, (member, (said, sources)) in enumerate(zip(members, emitted, strict=True)):
            logs = scores.log_probs(b, verdicts[b], said) if member.request.log_probs else None
            most = member.request.top_log_probs
            top = scores.top_log_probs(b, verdicts[b], len(said), most) if most else None
            calls = (shared, *member.row.calls)
            member.row.calls.clear()
            what = (trees[b], drafted[b], verdicts[b], timings, logs, member.finish, prefill[b], calls, top)
            steps.append(Step(member.row.id, said, sources, *what))
        for slot in range(len(members) - 1, -1, -1):
            if members[slot].finish is not None:
                self._drop(slot)
        return steps

    def _refuse_numbers(self) -> NoReturn:
        """The target's scores are NaN or infinite, so nothing that it could say would be its output."""
        self.clear()
        kind = str(self.target.dtype).removeprefix("torch.")
        advice = "check the weights" if kind == "float32" else "load it with dtype='float32', or check the weights"
        if kind == "float16":
            advice = "load it with dtype='bfloat16' or 'float32', or check the weights"
        raise NumericsError(f"the model's scores are not finite numbers in {kind}: its activations overflow; {advice}")

    def _draft(self, members: list[Member]) -> tuple[list[DraftTree], list[int]]:
        """Draft for each row; returns the trees to verify, and the number of drafted nodes."""
        rows, drafters = [member.row for member in members], [member.drafter for member in members]
        groups = _by_drafter(members)
        if any(drafter not in self._plans for drafter in groups):
            self._plans = self._plan(members)
        trees: list[DraftTree] = [None] * len(members)  # type: ignore[list-item]
        for drafter, places in groups.items():
            if self._plans[drafter].nodes < 1:
                drafted = [DraftTree.root(rows[b].root) for b in places]
            else:
                drafted = drafter.draft([rows[b] for b in places], self._plans[drafter].nodes)
            for b, tree in zip(places, drafted, strict=True):
                trees[b] = tree
        for b, member in enumerate(members):
            if member.guided:
                trees[b] = guided(member, trees[b], member.drafter.max_nodes)
        counts = [tree.size - 1 for tree in trees]
        if any(drafter.adaptive and (self._plans[drafter].nodes or counts[b]) for b, drafter in enumerate(drafters)):
            trees = self.controller.choose(rows, drafters, trees, self._plans)
        return trees, counts

    def _draft_on_device(self, members: Sequence[Member]) -> DeviceTrees | None:
        """The trees of all rows where a GPU grew them, unless the host has to see them before they are verified."""
        drafter = members[0].drafter
        if not self.target.backend.verifies or drafter.adaptive or drafter.needs.probes or drafter not in self._plans:
            return None
        if any(member.drafter is not drafter or not member.greedy or member.unread for member in members):
            return None
        if any(member.guided for member in members) or not isinstance(drafter, DeviceDrafter):
            return None
        rows = [member.row for member in members]
        return drafter.draft_on_device(rows, self._plans[drafter].nodes, self.cache.lengths[: len(rows)])

    def _bound_depth(self, members: Sequence[Member]) -> None:
        """Limit the depth of drafts to the tokens that each row may still emit before its last one.

        A text that is read again at some length (``Rope.reread_after``) has no drafts across it: what the target says
        beyond depends on the new rotations of what stands before.
        """
        again = self.target.rope().reread_after or 0
        for member in members:
            length = len(member.row.tokens)
            depth = member.limit - length - 1
            member.row.max_depth = min(depth, again - length) if length <= again else depth

    def _plan(self, members: Sequence[Member]) -> dict[Drafter, Plan]:
        """The plan of each drafter for the next step."""
        groups = {drafter: len(places) for drafter, places in _by_drafter(members).items()}
        if not any(drafter.adaptive for drafter in groups):
            return {drafter: Plan(drafter.max_nodes) for drafter in groups}
        return self.controller.plan(groups, _context(members))

    def _probes(self, members: Sequence[Member]) -> list[DraftTree]:
        """The probes beside the rows' drafts; empty if no drafter has any."""
        if not any(member.drafter.needs.probes for member in members):
            return []
        probes = [DraftTree.root(member.row.root) for member in members]
        for drafter, places in _by_drafter(members).items():
            if drafter.needs.probes and self._plans[drafter].nodes > 1:
                assert isinstance(drafter, ProbingDrafter)
                for b, probe in zip(places, drafter.probe([members[b].row for b in places]), strict=True):
                    probes[b] = probe
        return probes

    def _forward(
        self, members: list[Member], trees: Sequence[DraftTree] | DeviceTrees, probes: Sequence[DraftTree]
    ) -> PassResult:
        """The pass over all rows' trees; where every row takes the most probable tokens, these come with it.

        A backend may return accepted paths instead, unless nodes besides those of the trees are in the pass.
        """
        prompts = [member.row.tokens[member.read : member.read + member.unread] for member in members]
        taps = {layer for member in members for layer in member.drafter.needs.layers}
        if probes:
            assert not isinstance(trees, DeviceTrees)
            trees = [tree.beside(probe) for tree, probe in zip(trees, probes, strict=True)]
        constrained = any(member.constraint is not None for member in members)
        need: Need = "tokens" if probes or any(prompts) or constrained else "paths"
        # not through ``Module.__call__``, which first looks for hooks
        return self.target.forward(
            trees if isinstance(trees, DeviceTrees) else Inputs.of_trees(trees, prompts),
            self.cache,
            slots=slice(0, len(members)),
            taps=sorted(taps),
            rider=self.rider_of(members[0].drafter),
            need=need if all(member.greedy for member in members) else "hidden",
            loras=[member.request.lora for member in members],
        )

    @staticmethod
    def _emit(member: Member, tree: DraftTree, verdict: Verdict) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Append what was accepted to the row's text; an end token or the length limit cuts the accepted path."""
        if len(verdict.path) == 1:
            tokens, sources = [verdict.next_token], ["target"]
        else:
            tokens = [int(tree.tokens[node]) for node in verdict.path[1:]] + [verdict.next_token]
            sources = [tree.sources[node] for node in verdict.path[1:]] + ["target"]
        for count, token in enumerate(tokens, 1):
            if token in member.request.stop_ids:
                member.finish = "stop"
            elif len(member.row.tokens) + count >= member.limit:
                member.finish = "length"
            if member.finish is not None:
                tokens, sources = tokens[:count], sources[:count]
                break
        member.row.tokens.extend(tokens)
        return tuple(tokens), tuple(sources)

    def _observe(
        self,
        members: list[Member],
        result: PassResult,
        trees: list[DraftTree],
        verdicts: list[Verdict],
        probed: Sequence[NDArray[np.int64]],
    ) -> None:
        """Show every drafter what became of its rows, and how large a draft to prepare."""
        going = [member for member in members if member.finish is None]
        self._plans = self._plan(going)
        self._bound_depth(going)
        for drafter, places in _by_drafter(members).items():
            plan = self._plans.get(drafter, Plan(0))
            seen = Observation(
                result,
                self.cache,
                places,
                [trees[b] for b in places],
                [verdicts[b] for b in places],
                [members[b].finish is None for b in places],
                max(1, plan.nodes),
                [probed[b] for b in places] if probed else (),
            )
            drafter.observe([members[b].row for b in places], seen)
        for member, tree, verdict in zip(members, trees, verdicts, strict=True):
            if tree.size > 1 and tree.log_probs is not None and member.row.rule == "match":
                member.row.acceptance.learn(tree, verdict.path)


def _by_drafter(members: Sequence[Member]) -> dict[Drafter, list[int]]:
    """Rows by their drafter."""
    groups: dict[Drafter, list[int]] = {}
    for b, member in enumerate(members):
        groups.setdefault(member.drafter, []).append(b)
    return groups


def _context(members: Sequence[Member]) -> float:
    """Mean tokens in the rows' caches."""
    return sum(len(member.row.tokens) for member in members) / max(1, len(members))
