"""The decoding loop. There is one, for every method, batch and sampling rule.

    draft    the drafters propose a tree a row, and the load decides how much of it is verified
    forward  one pass of the target over all rows' trees
    verify   which path the target accepts, and its own next token
    commit   keep the accepted nodes in the KV cache
    observe  the drafters see what happened, and prepare what they will draft next

A row's root is its last committed token, which is not in the cache yet: the pass that verifies a draft computes the
root's keys and values too. So the cache holds one token less than the text, and plain decoding is a tree of one node.

The engine knows token ids; text belongs to ``generation``, and who decodes when to ``scheduler``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.costs import costs_of
from anabranch.errors import InputError, NumericsError
from anabranch.methods.base import Drafter, Observation, Row
from anabranch.methods.none import NoDrafter
from anabranch.model.cache import Cache, shared_length
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.passes import PassResult
from anabranch.sampling import SamplingParams, argmax, generator, log_probs, position_keys, target_probs
from anabranch.speculation import Speculation
from anabranch.tree import DraftTree
from anabranch.verify import Rule, Verdict, match, reject

__all__ = ["Engine", "FinishReason", "Request", "Step", "Timings"]

FinishReason = Literal["stop", "length"]
CHUNK = 512  # tokens of a prompt that one pass reads


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    stop_ids   end it, and are emitted
    rule       how drafts are verified
    log_probs  whether steps carry the target's raw log probability of each token
    on_prompt  called as on_prompt(done, total) after each chunk of the prompt; what it raises cancels the request
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    rule: Rule = "match"
    log_probs: bool = False
    on_prompt: Callable[[int, int], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Timings:
    """Seconds of one step by part, for all its rows together; commit includes preparing the next draft."""

    draft: float
    forward: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.draft + self.forward + self.verify + self.commit


@dataclass(frozen=True)
class Step:
    """What one target pass did for one row.

    tokens     emitted, in order; the last is the target's own unless the row was cut before it
    sources    who proposed each of them; "target" for the target's own
    tree       what was verified (after pruning); ``drafted`` nodes were proposed before it
    log_probs  the target's raw log probability of each token, where asked for
    finish     set on the last step of a row
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


class _Member:
    """A row of the batch with its request and drafter. ``limit`` is the length at which its text ends."""

    def __init__(self, request: Request, drafter: Drafter, limit: int) -> None:
        self.request, self.drafter, self.limit = request, drafter, limit
        self.row = Row([int(t) for t in request.prompt_ids], len(request.prompt_ids), request.sampling, request.rule)
        self.read = 0  # prompt tokens in the cache
        self.finish: FinishReason | None = None
        sampling = request.sampling
        self.greedy = sampling.greedy and not sampling.needs_history and not request.log_probs

    @property
    def ready(self) -> bool:
        """Whether its prompt is in the cache, all but the last token, which is the first root."""
        return self.read >= self.row.prompt_length - 1


class Engine:
    """Decodes up to ``rows`` sequences at a time, each of at most ``capacity`` tokens, prompt included.

    drafter      that of rows that name none; None: plain decoding
    margin       cache positions behind a row's tokens that the drafters of rows will need, if they are known
    speculation  decides how much of adaptive drafters' drafts is verified; None: one of the engine's own
    on_leave     called with each row and its cache slot before it leaves, while its keys and values are still there
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None = None,
        *,
        rows: int = 1,
        capacity: int = 2048,
        margin: int = 1,
        speculation: Speculation | None = None,
        on_leave: Callable[[Row, int], None] | None = None,
    ) -> None:
        if rows < 1 or capacity < 2:
            raise InputError(f"an engine needs at least 1 row and 2 tokens, got {rows} and {capacity}")
        self.target, self.drafter = target, drafter or NoDrafter()
        self.capacity = min(capacity, target.config.max_positions)
        self.cache = self._new_cache(rows, self.capacity + max(margin, self.drafter.margin))
        self._speculation, self._on_leave = speculation, on_leave
        self._members: list[_Member] = []  # of the cache's slots, in order; those still reading their prompt are last
        self._budgets: dict[Drafter, int] = {}
        self._prepared = 0.0  # seconds that preparing the next step's drafts took
        self.at_fault: int | None = None  # the row whose own functions or numbers ended the last read or step

    def _new_cache(self, rows: int, positions: int) -> Cache:
        target = self.target
        kernels = target.backend.kernels
        return Cache(
            *(target.config,), rows=rows, capacity=positions, dtype=target.dtype, device=target.device, kernels=kernels
        )

    @property
    def rows(self) -> int:
        """Rows that the cache has room for."""
        return self.cache.rows

    @property
    def active(self) -> int:
        """Rows in use."""
        return len(self._members)

    @property
    def reading(self) -> int | None:
        """The id of the row whose prompt is being read, if any."""
        last = self._members[-1] if self._members else None
        return None if last is None or last.ready else last.row.id

    @property
    def speculation(self) -> Speculation:
        """The controller; its costs are measured when it is first needed."""
        if self._speculation is None:
            self._speculation = Speculation(costs_of(self.target), ragged=self.target.ragged)
        return self._speculation

    def speculate(self, speculation: Speculation) -> None:
        """Leave adaptive drafts to another controller."""
        self._speculation = speculation

    @property
    def learned(self) -> Speculation | None:
        """The controller, if it was needed so far."""
        return self._speculation

    # -- rows join and leave ----------------------------------------------------------------------------
    def add(self, request: Request, drafter: Drafter | None = None) -> int:
        """Take a row and read its whole prompt; returns the row's id. Raises for what cannot be served."""
        key = self.join(request, drafter)
        while not self.read():
            pass
        return key

    def join(self, request: Request, drafter: Drafter | None = None, *, known: int = 0) -> int:
        """Take a row whose prompt is still to be read; returns its id.

        The first ``known`` tokens of the prompt are in the cache slot already (``cache.fork``).

        Raises InputError or CapabilityError for what cannot be served, and InputError where all rows are in use or
        this one cannot share their pass (``fits``).
        """
        drafter = self.arm(drafter or self.drafter)
        self.check(request, drafter)
        assert self.reading is None, "one prompt is read at a time"
        if not self.fits(request, drafter):
            raise InputError("the request cannot share a pass with the rows in use; wait for them to finish")
        self.reserve(self.cache.rows, len(request.prompt_ids) + 1, drafter)
        member = _Member(request, drafter, min(len(request.prompt_ids) + request.max_new_tokens, self.capacity))
        slot = self.cache.add_row()
        assert known < member.row.prompt_length
        self.cache.lengths[slot] = member.read = known
        self._members.append(member)
        drafter.join(member.row)
        return member.row.id

    @torch.inference_mode()
    def read(self, chunk: int = CHUNK) -> bool:
        """Read the next ``chunk`` tokens of the prompt that is being read; returns whether none is left.

        Where that fails, its row leaves.
        """
        if self.reading is None:
            return True
        member, slot = self._members[-1], len(self._members) - 1
        row, start, total = member.row, member.read, member.row.prompt_length - 1
        self.at_fault = None
        tokens = row.tokens[start : min(start + chunk, total)]
        try:
            with self.target.decoding():
                where, taps = slice(slot, slot + 1), member.drafter.needs.layers if member.drafter.needs.prompt else ()
                result = self.target(
                    *(Inputs.of_prompt(tokens), self.cache), slots=where, planned=member.limit, taps=taps, need="hidden"
                )
            self.cache.commit([range(len(tokens))])
            member.read += len(tokens)
            member.drafter.read(row, result, start)
            if member.request.on_prompt is not None:
                self.at_fault = row.id
                member.request.on_prompt(member.read, total)
                self.at_fault = None
        except BaseException:
            self._drop(slot, failed=True)
            raise
        return member.ready

    @staticmethod
    def refuse(target: Decoder, request: Request, drafter: Drafter) -> None:
        """Raise InputError or CapabilityError if ``request`` cannot be served at all."""
        prompt = request.prompt_ids
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        vocabulary = target.config.vocab_size
        if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
            raise InputError(f"the prompt has the token id {wrong[0]}, but the vocabulary ends at {vocabulary - 1}")
        longest = target.config.max_positions
        if len(prompt) >= longest:
            raise InputError(f"the prompt has {len(prompt)} tokens, but the model's limit is {longest}; shorten it")
        drafter.check(request.sampling, request.rule)

    def check(self, request: Request, drafter: Drafter | None = None) -> None:
        """Raise InputError or CapabilityError if ``request`` cannot be served here; ``join`` asks too."""
        self.refuse(self.target, request, drafter or self.drafter)
        if len(request.prompt_ids) >= self.capacity:
            raise InputError(
                f"the prompt has {len(request.prompt_ids)} tokens, but the cache holds {self.capacity}; shorten it"
            )

    def arm(self, drafter: Drafter, rows: int = 0) -> Drafter:
        """The drafter of a row that joins now: ``drafter``, or one of its arms.

        rows  the rows that will soon be in use, if more than now
        """
        if not drafter.arms:
            return drafter
        last = self._members[-1].drafter if self._members else None
        able = [arm for arm in drafter.arms if last is None or arm.rider is last.rider]
        if not able:
            return drafter.arms[0]  # it waits, as any of them would
        return self.speculation.arm(able, max(rows, self.active + 1), _context(self._members), using=last)

    def longest_shared(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many of ``tokens`` a row in use has in its cache from the start, the most of all rows, and its slot."""
        best, slot = 0, 0
        for place, member in enumerate(self._members):
            count = shared_length(member.row.tokens[: self.cache.lengths[place]], tokens)
            if count > best:
                best, slot = count, place
        return best, slot

    def fits(self, request: Request, drafter: Drafter | None = None, *, capacity: int = 0) -> bool:
        """Whether a request can share a pass with the rows in use, now; ``capacity`` will be reserved for it.

        Rotations that depend on a text's length take one length a pass, and a drafter's rows that travel in the pass
        are those of one drafter.
        """
        if not self._members:
            return True
        first, rider = self._members[0], (drafter or self.drafter).rider
        if first.drafter.rider is not rider:
            return False
        rope = self.target.config.rope
        kind = (rope.scaling or {}).get("rope_type", (rope.scaling or {}).get("type"))
        if kind not in ("dynamic", "longrope"):
            return True
        limit = min(len(request.prompt_ids) + request.max_new_tokens, max(capacity, self.capacity))
        original = rope.original_max_positions or rope.max_positions
        return first.limit == limit or max(first.limit, limit) <= original

    def reserve(self, rows: int, capacity: int, drafter: Drafter | None = None) -> None:
        """Make room for so many rows and tokens; rows in use keep what they have. Raises DeviceError."""
        capacity = min(capacity, self.target.config.max_positions)
        positions = max(capacity, self.capacity) + (drafter or self.drafter).margin
        if rows > self.cache.rows or positions > self.cache.capacity:
            self.cache = self.cache.resized(max(rows, self.cache.rows), max(positions, self.cache.capacity))
        self.capacity = max(capacity, self.capacity)

    def remove(self, key: int) -> None:
        """Cancel a row; one that has left already is ignored."""
        slot = next((i for i, member in enumerate(self._members) if member.row.id == key), None)
        if slot is not None:
            self._drop(slot)

    def clear(self) -> None:
        """Cancel all rows, without ``on_leave``: after an error their cache is not to be trusted."""
        while self._members:
            self._drop(len(self._members) - 1, failed=True)

    def _drop(self, slot: int, *, failed: bool = False) -> None:
        member = self._members[slot]
        if self._on_leave is not None and not failed:
            self._on_leave(member.row, slot)
        ready = len(self._members) - (self.reading is not None)
        if slot < ready - 1:  # the last ready row takes the place, the one that is being read stays last
            self.cache.move_row(ready - 1, slot)
            self._members[slot] = self._members[ready - 1]
            slot = ready - 1
        self.cache.remove_row(slot)
        self._members[slot] = self._members[-1]
        self._members.pop()
        member.drafter.leave(member.row)

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

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """One target pass for all rows whose prompts are read; rows that are done leave.

        Raises NumericsError where the target's scores are not finite numbers; all rows leave then.
        """
        self.at_fault = None
        members = self._members[: len(self._members) - (self.reading is not None)]
        if not members:
            return []
        with self.target.decoding():
            return self._step(members)

    def _step(self, members: list[_Member]) -> list[Step]:
        began = time.perf_counter()
        trees, drafted = self._draft(members)
        probes = self._probes(members)
        after_draft = time.perf_counter()
        planned = max(member.limit for member in members)
        result = self._forward(members, trees, probes, planned)
        if result.kept is not None:
            trees = [tree.select(kept) for tree, kept in zip(trees, result.kept, strict=True)]
        tokens, logits = self._scores(members, result)
        after_forward = time.perf_counter()
        verdicts = [
            self._verify(member, tree, tokens.get(b), logits.get(b))
            for b, (member, tree) in enumerate(zip(members, trees, strict=True))
        ]
        probed = [
            self._probed(members[b], trees[b].size, probe, tokens.get(b), logits.get(b))
            for b, probe in enumerate(probes)
        ]
        after_verify = time.perf_counter()
        wrong = [member.row.id for member, verdict in zip(members, verdicts, strict=True) if verdict.next_token < 0]
        if wrong:
            self.at_fault = wrong[0] if len(wrong) < len(members) else None
            self._refuse_numbers()

        self.cache.commit([verdict.path for verdict in verdicts])
        emitted = [self._emit(*each) for each in zip(members, trees, verdicts, strict=True)]
        budgets, prepared, after_commit = self._budgets, self._prepared, time.perf_counter()
        yielded = sum(len(said) for said, _ in emitted)
        if any(member.drafter.adaptive for member in members):
            self.speculation.saw_step(len(members), yielded, 1e3 * (after_commit - began + prepared))
        self._observe(members, result, trees, verdicts, probed, planned)
        done = time.perf_counter()
        self._prepared = done - after_commit
        timings = Timings(
            after_draft - began, after_forward - after_draft, after_verify - after_forward, done - after_verify
        )
        if any(member.drafter.adaptive for member in members):
            self._learn(members, result.counts_B, budgets, timings)
        steps = []
        for b, (member, (said, sources)) in enumerate(zip(members, emitted, strict=True)):
            logs = self._log_probs(logits[b], verdicts[b], said) if member.request.log_probs else None
            finish = member.finish
            steps.append(Step(member.row.id, said, sources, trees[b], drafted[b], verdicts[b], timings, logs, finish))
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

    def _draft(self, members: list[_Member]) -> tuple[list[DraftTree], list[int]]:
        """What is verified of each row's draft, and the nodes that were drafted."""
        rows, drafters = [member.row for member in members], [member.drafter for member in members]
        for member in members:
            # a draft deeper than what may still be emitted beside the next token is of no use
            member.row.max_depth = member.limit - len(member.row.tokens) - 1
        groups = _by_drafter(members)
        if any(drafter not in self._budgets for drafter in groups):
            self._budgets = self._plan(members)
        trees: list[DraftTree] = [None] * len(members)  # type: ignore[list-item]
        for drafter, places in groups.items():
            if self._budgets[drafter] < 1:
                drafted = [DraftTree.root(rows[b].root) for b in places]
            else:
                drafted = drafter.draft([rows[b] for b in places], self._budgets[drafter])
            for b, tree in zip(places, drafted, strict=True):
                trees[b] = tree
        counts = [tree.size - 1 for tree in trees]
        if any(drafter.adaptive and self._budgets[drafter] for drafter in groups):
            trees = self.speculation.choose(rows, drafters, trees, self._budgets)
        return trees, counts

    def _plan(self, members: Sequence[_Member]) -> dict[Drafter, int]:
        """The budget of each drafter's next draft."""
        groups = {drafter: len(places) for drafter, places in _by_drafter(members).items()}
        if not any(drafter.adaptive for drafter in groups):
            return {drafter: drafter.max_nodes for drafter in groups}
        return self.speculation.plan(groups, _context(members))

    def _probes(self, members: Sequence[_Member]) -> list[DraftTree]:
        """What travels beside each row's draft; nothing at all where no drafter has probes."""
        if not any(member.drafter.probes for member in members):
            return []
        probes = [DraftTree.root(member.row.root) for member in members]
        for drafter, places in _by_drafter(members).items():
            if drafter.probes and self._budgets[drafter] > 1:
                for b, probe in zip(places, drafter.probe([members[b].row for b in places]), strict=True):
                    probes[b] = probe
        return probes

    def _forward(
        self, members: list[_Member], trees: Sequence[DraftTree], probes: Sequence[DraftTree], planned: int
    ) -> PassResult:
        """The pass over all rows' trees; tokens come with it where every row takes the most probable ones."""
        taps = {layer for member in members for layer in member.drafter.needs.layers}
        if probes:
            trees = [tree.beside(probe) for tree, probe in zip(trees, probes, strict=True)]
        result: PassResult = self.target(
            Inputs.of_trees(trees),
            self.cache,
            slots=slice(0, len(members)),
            planned=planned,
            taps=sorted(taps),
            rider=members[0].drafter.rider,
            need="tokens" if all(member.greedy for member in members) else "hidden",
        )
        return result

    def _scores(
        self, members: list[_Member], result: PassResult
    ) -> tuple[dict[int, NDArray[np.int64]], dict[int, Tensor]]:
        """By row, the greedy tokens of its nodes, or its logits where more than those is asked for.

        Rows that only need tokens do not pay for the logits of others.
        """
        plain = [b for b, member in enumerate(members) if member.greedy]
        others = [b for b, member in enumerate(members) if not member.greedy]
        tokens: dict[int, NDArray[np.int64]] = {}
        logits: dict[int, Tensor] = {}
        if plain:
            if result.tokens_M is not None:
                chosen = result.tokens_M.cpu().numpy()
                tokens = {b: chosen[result.nodes(b)] for b in plain}
            else:
                hidden, parts = _gathered(result, plain)
                chosen = self.target.choose(hidden).cpu().numpy()
                tokens = {b: chosen[part] for b, part in zip(plain, parts, strict=True)}
        if others:
            hidden, parts = _gathered(result, others)
            whole = self.target.logits(hidden)
            logits = {b: whole[part] for b, part in zip(others, parts, strict=True)}
        return tokens, logits

    def _verify(
        self, member: _Member, tree: DraftTree, tokens_N: NDArray[np.int64] | None, logits_NV: Tensor | None
    ) -> Verdict:
        if tokens_N is not None:
            return match(tree, tokens_N[: tree.size])
        assert logits_NV is not None
        self.at_fault = member.row.id  # processors are the caller's own functions
        verdict = self._verify_logits(member, tree, logits_NV[: tree.size])
        self.at_fault = None
        return verdict

    def _probed(
        self,
        member: _Member,
        behind: int,
        probe: DraftTree,
        tokens_N: NDArray[np.int64] | None,
        logits_NV: Tensor | None,
    ) -> NDArray[np.int64]:
        """The target's own tokens after a row's probe, which follows ``behind`` other nodes.

        Drawn as the row's tokens at those positions will be, so that guesses agree with them. Penalties and processors
        are left out: they cost much, and are not to see what nobody wrote.
        """
        if tokens_N is not None:
            return tokens_N[behind:]
        assert logits_NV is not None
        sampling, logits_NV = member.request.sampling, logits_NV[behind:]
        if sampling.greedy or sampling.needs_history or probe.size == 1:
            return argmax(logits_NV).cpu().numpy()
        keys = position_keys(sampling.seed, len(member.row.tokens) + probe.depths[1:])
        return self.target.draw(logits_NV, sampling, keys).cpu().numpy()

    def _verify_logits(self, member: _Member, tree: DraftTree, logits_NV: Tensor) -> Verdict:
        sampling, text = member.request.sampling, member.row.tokens
        histories = None
        if sampling.needs_history:
            histories = [[*text[:-1], *(int(tree.tokens[i]) for i in tree.path_to(node))] for node in range(tree.size)]
        if member.request.rule == "rejection":
            probs = target_probs(logits_NV, sampling, histories)
            return reject(tree, probs, generator(sampling.seed, len(text)))
        if sampling.greedy and not sampling.needs_history:
            return match(tree, argmax(logits_NV).cpu().numpy())
        keys = position_keys(sampling.seed, len(text) + tree.depths)
        return match(tree, self.target.draw(logits_NV, sampling, keys, histories).cpu().numpy())

    @staticmethod
    def _emit(member: _Member, tree: DraftTree, verdict: Verdict) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Append what was accepted to the row's text; an end token or the length limit cuts the accepted path."""
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
        members: list[_Member],
        result: PassResult,
        trees: list[DraftTree],
        verdicts: list[Verdict],
        probed: Sequence[NDArray[np.int64]],
        planned: int,
    ) -> None:
        """Show every drafter what became of its rows, and how large a draft to prepare."""
        going = [member for member in members if member.finish is None]
        self._budgets = self._plan(going)
        for drafter, places in _by_drafter(members).items():
            seen = Observation(
                result,
                self.cache,
                places,
                [trees[b] for b in places],
                [verdicts[b] for b in places],
                [members[b].finish is None for b in places],
                planned,
                self._budgets.get(drafter, 1),
                [probed[b] for b in places] if probed else (),
            )
            drafter.observe([members[b].row for b in places], seen)
        for member, tree, verdict in zip(members, trees, verdicts, strict=True):
            if tree.size > 1 and tree.log_probs is not None and member.row.rule == "match":
                if member.drafter.adaptive:
                    self.speculation.learn(member.row, tree, verdict)
                member.row.beliefs.learn(tree, verdict.path)

    def _learn(
        self,
        members: list[_Member],
        sizes: Sequence[int],
        budgets: dict[Drafter, int],
        timings: Timings,
    ) -> None:
        """Take the step's times into the costs; ``sizes``: nodes of each row, ``budgets``: those drafted with."""
        costs, rows, prepare = self.speculation.costs, len(members), self._prepared
        nodes = sum(sizes) if self.speculation.ragged else rows * max(sizes)
        costs.saw_pass(1e3 * timings.forward, nodes, rows, _context(members))
        costs.saw_rest(1e3 * (timings.verify + timings.commit - prepare), rows)
        groups = _by_drafter(members)
        if len(groups) > 1:
            return  # whose draft took how long is not known
        for drafter, places in groups.items():
            if budgets.get(drafter, 1) > 1 and not drafter.free:
                costs.saw_draft(drafter.name, 1e3 * timings.draft, budgets[drafter], len(places))
            elif budgets.get(drafter, 1):
                costs.saw_free(drafter.name, 1e3 * timings.draft, len(places))
            live = sum(members[b].finish is None for b in places)
            if live and not drafter.free and (budget := self._budgets.get(drafter, 1)) > 1:
                costs.saw_prepare(drafter.name, 1e3 * prepare, live * drafter.depth_of(budget))

    @staticmethod
    def _log_probs(logits_NV: Tensor, verdict: Verdict, tokens: tuple[int, ...]) -> tuple[float, ...]:
        nodes = torch.tensor(verdict.path[: len(tokens)], device=logits_NV.device)
        found: list[float] = log_probs(logits_NV[nodes], torch.tensor(tokens, device=logits_NV.device)).tolist()
        return tuple(found)


def _by_drafter(members: Sequence[_Member]) -> dict[Drafter, list[int]]:
    """Rows by their drafter."""
    groups: dict[Drafter, list[int]] = {}
    for b, member in enumerate(members):
        groups.setdefault(member.drafter, []).append(b)
    return groups


def _context(members: Sequence[_Member]) -> float:
    """Mean tokens in the rows' caches."""
    return sum(len(member.row.tokens) for member in members) / max(1, len(members))


def _gathered(result: PassResult, rows: Sequence[int]) -> tuple[Tensor, list[slice]]:
    """The hidden states of some rows' nodes, one behind another, and where each row's lie."""
    parts = [result.hidden_MD[result.nodes(b)] for b in rows]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return torch.cat(parts), [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
