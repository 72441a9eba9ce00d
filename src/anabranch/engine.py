"""The decoding loop. There is one, for every method, batch and sampling rule.

    draft    the drafter proposes a tree a row
    forward  one pass of the target over all rows' trees
    verify   which path the target accepts, and its own next token
    commit   keep the accepted rows of the cache
    observe  the drafter sees what happened

A row's root is its last committed token, which is not in the cache yet: the pass that verifies a draft computes the
root's keys and values too. So the cache holds one token less than the text, and plain decoding is a tree of one node.

The engine knows token ids; text belongs to ``generation``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.errors import CapabilityError, InputError, NumericsError
from anabranch.methods.base import Context, Drafter, Observation
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder, Inputs, PassResult
from anabranch.sampling import SamplingParams, argmax, generator, log_probs, position_keys, target_probs
from anabranch.tree import DraftTree
from anabranch.verify import Rule, Verdict, match, reject

__all__ = ["Engine", "FinishReason", "Request", "Step", "Timings"]

FinishReason = Literal["stop", "length"]
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Request:
    """One sequence to decode. ``stop_ids`` end it (and are emitted); ``rule`` says how drafts are verified.

    ``on_prompt(done, total)`` is called after each chunk of the prompt; what it raises cancels the request.
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
    """Seconds of one step by part; a step of several rows has one clock."""

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


class _Row:
    def __init__(self, request: Request, context: Context, limit: int, planned: int) -> None:
        self.request, self.context, self.limit, self.planned = request, context, limit, planned
        self.finish: FinishReason | None = None

    @property
    def emitted(self) -> int:
        return len(self.context.tokens) - self.context.prompt_length


class Engine:
    """Decodes up to ``rows`` sequences at a time, each of at most ``capacity`` tokens, prompt included.

    ``cache`` is the one of an engine that is idle and not used any more, for at least ``rows`` rows; its size decides
    the capacity then. Without one, the engine allocates its own.
    """

    def __init__(
        self, target: Decoder, drafter: Drafter, *, rows: int = 1, capacity: int = 2048, cache: Cache | None = None
    ) -> None:
        if cache is not None:
            assert cache.count == 0
            assert cache.rows >= rows
            capacity = cache.capacity - drafter.room
        if rows < 1 or capacity < 2:
            raise InputError(f"an engine needs at least 1 row and 2 tokens, not {rows} and {capacity}")
        self.target, self.drafter, self.rows = target, drafter, rows
        self.capacity = min(capacity, target.config.max_positions)
        self.cache = cache or Cache(
            target.config,
            rows=rows,
            capacity=self.capacity + drafter.room,
            dtype=target.dtype,
            device=target.device,
            kernels=None if target.stack is None else target.stack.kernels,
        )
        self._rows: list[_Row] = []

    @property
    def active(self) -> int:
        """Rows in use."""
        return len(self._rows)

    # -- rows enter and leave -----------------------------------------------------------------------
    @torch.inference_mode()
    def add(self, request: Request) -> int:
        """Take a row for ``request`` and read its prompt; returns the row's key. Refuses what cannot be served."""
        self.check(request)
        prompt = [int(token) for token in request.prompt_ids]
        limit = min(len(prompt) + request.max_new_tokens, self.capacity)
        planned = self._plan(limit)
        slot = self.cache.add_row()
        try:
            with self.target.decoding():
                self._read(prompt[:-1], slot, planned, request.on_prompt)
        except BaseException:
            self.cache.remove_row(slot)
            raise
        context = Context(prompt, len(prompt), request.sampling, request.rule)
        self._rows.append(_Row(request, context, limit, planned))
        return context.key

    def _read(self, tokens: list[int], slot: int, planned: int, on_prompt: Callable[[int, int], None] | None) -> None:
        """Put what stands before a row's first root into the cache."""
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            where = slice(slot, slot + 1)
            self.target(Inputs.of_prompt(chunk), self.cache, slots=where, planned=planned, need="hidden")
            self.cache.commit([range(len(chunk))])
            if on_prompt is not None:
                on_prompt(start + len(chunk), len(tokens))

    def check(self, request: Request) -> None:
        """Raise InputError or CapabilityError if ``request`` cannot be served; ``add`` asks too."""
        prompt = request.prompt_ids
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        vocabulary = self.target.config.vocab_size
        if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
            raise InputError(f"the prompt has the token id {wrong[0]}, but the vocabulary ends at {vocabulary - 1}")
        longest = self.target.config.max_positions
        if len(prompt) >= longest:
            raise InputError(f"the prompt has {len(prompt)} tokens, but the model's limit is {longest}; shorten it")
        if len(prompt) >= self.capacity:
            raise InputError(f"the prompt has {len(prompt)} tokens, but the cache holds {self.capacity}; shorten it")
        self.drafter.check(request.sampling, request.rule)

    def _plan(self, limit: int) -> int:
        """The length that rotations are planned for; rows of one batch must agree where they depend on it."""
        scaling = self.target.config.rope.scaling or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if self._rows and kind in ("dynamic", "longrope"):
            planned = self._rows[0].planned
            original = self.target.config.rope.original_max_positions or self.target.config.rope.max_positions
            if planned != limit and max(planned, limit) > original:
                raise CapabilityError(
                    f"{kind} rotary positions depend on the length of the text, so rows of different lengths beyond "
                    f"{original} tokens cannot share a batch; decode these prompts one by one"
                )
        return limit

    def remove(self, key: int) -> None:
        """Cancel a row."""
        slot = next((i for i, row in enumerate(self._rows) if row.context.key == key), None)
        if slot is not None:
            self._drop(slot)

    def clear(self) -> None:
        """Cancel all rows."""
        while self._rows:
            self._drop(len(self._rows) - 1)

    def _drop(self, slot: int) -> None:
        self.cache.remove_row(slot)
        row = self._rows[slot]
        self._rows[slot] = self._rows[-1]
        self._rows.pop()
        self.drafter.leave(row.context)

    def rehearse(self, request: Request) -> None:
        """Decode ``request`` as often as shapes must come to be recorded, where they are: for whoever times it then."""
        for _ in range(0 if self.target.recorder is None else 2):
            self.add(request)
            for _ in self.run():
                pass

    # -- the loop -------------------------------------------------------------------------------------
    def run(self) -> Iterator[Step]:
        """Steps of all rows until none is left."""
        while self._rows:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """One target pass for all rows in use; rows that are done leave.

        Raises NumericsError where the target's scores are not finite numbers; all rows leave then.
        """
        if not self._rows:
            return []
        with self.target.decoding():
            return self._step()

    def _step(self) -> list[Step]:
        rows = self._rows
        contexts = [row.context for row in rows]
        began = time.perf_counter()
        for row in rows:
            # a draft deeper than what may still be emitted beside the next token is of no use
            row.context.room = row.limit - len(row.context.tokens) - 1
        trees = self.drafter.draft(contexts)
        drafted = [tree.size - 1 for tree in trees]
        after_draft = time.perf_counter()

        planned = max(row.planned for row in rows)
        rider = self.drafter.rider
        greedy = all(row.request.sampling.greedy and not row.request.sampling.needs_history for row in rows)
        logits = not greedy or any(row.request.log_probs for row in rows)
        feed = Inputs.of_trees(trees)
        output = self.target(feed, self.cache, planned=planned, rider=rider, need="logits" if logits else "tokens")
        if rider is not None and rider.kept is not None:
            host = rider.kept.cpu().numpy()
            trees = [tree.select(nodes[nodes < tree.size]) for tree, nodes in zip(trees, host, strict=True)]
        picked = self._greedy(output) if greedy else None
        after_forward = time.perf_counter()

        verdicts = [
            self._verify(row, tree, output, b, None if picked is None else picked[b])
            for b, (row, tree) in enumerate(zip(rows, trees, strict=True))
        ]
        after_verify = time.perf_counter()
        if any(verdict.next_token < 0 for verdict in verdicts):
            self._refuse_numbers()

        self.cache.commit([verdict.path for verdict in verdicts])
        emitted = [self._emit(row, tree, verdict) for row, tree, verdict in zip(rows, trees, verdicts, strict=True)]
        live = [row.finish is None for row in rows]
        self.drafter.observe(contexts, Observation(output, self.cache, trees, verdicts, live, planned))
        after_commit = time.perf_counter()

        timings = Timings(
            after_draft - began,
            after_forward - after_draft,
            after_verify - after_forward,
            after_commit - after_verify,
        )
        steps = []
        for b, (row, (tokens, sources)) in enumerate(zip(rows, emitted, strict=True)):
            logs = self._log_probs(output, b, verdicts[b], tokens) if row.request.log_probs else None
            steps.append(
                Step(
                    row.context.key,
                    tokens,
                    sources,
                    trees[b],
                    drafted[b],
                    verdicts[b],
                    timings,
                    logs,
                    row.finish,
                )
            )
        for slot in range(len(rows) - 1, -1, -1):
            if rows[slot].finish is not None:
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

    def _greedy(self, output: PassResult) -> NDArray[np.int64]:
        """The target's own token at every node of every row in one read, where all rows are plainly greedy."""
        tokens = output.tokens_BN
        if tokens is None:
            assert output.logits_BNV is not None
            tokens = argmax(output.logits_BNV.flatten(0, 1)).view(output.logits_BNV.shape[:2])
        host: NDArray[np.int64] = tokens.cpu().numpy()
        return host

    def _verify(
        self, row: _Row, tree: DraftTree, output: PassResult, b: int, picked_N: NDArray[np.int64] | None
    ) -> Verdict:
        if picked_N is not None:
            return match(tree, picked_N[: tree.size])
        assert output.logits_BNV is not None
        sampling, text, logits_NV = row.request.sampling, row.context.tokens, output.logits_BNV[b, : tree.size]
        histories = None
        if sampling.needs_history:
            histories = [[*text[:-1], *(int(tree.tokens[i]) for i in tree.path_to(node))] for node in range(tree.size)]
        if row.request.rule == "rejection":
            probs = target_probs(logits_NV, sampling, histories)
            return reject(tree, probs, generator(sampling.seed, len(text)))
        keys = position_keys(sampling.seed, len(text) + tree.depths)
        return match(tree, self.target.draw(logits_NV, sampling, keys, histories).cpu().numpy())

    def _emit(self, row: _Row, tree: DraftTree, verdict: Verdict) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Append what was accepted to the row's text; EOS and the length limit cut inside the accepted path."""
        tokens = [int(tree.tokens[node]) for node in verdict.path[1:]] + [verdict.next_token]
        sources = [tree.sources[node] for node in verdict.path[1:]] + ["target"]
        for count, token in enumerate(tokens, 1):
            if token in row.request.stop_ids:
                row.finish = "stop"
            elif len(row.context.tokens) + count >= row.limit:
                row.finish = "length"
            if row.finish is not None:
                tokens, sources = tokens[:count], sources[:count]
                break
        row.context.tokens.extend(tokens)
        return tuple(tokens), tuple(sources)

    @staticmethod
    def _log_probs(output: PassResult, b: int, verdict: Verdict, tokens: tuple[int, ...]) -> tuple[float, ...]:
        assert output.logits_BNV is not None
        logits_NV = output.logits_BNV[b]
        nodes = torch.tensor(verdict.path[: len(tokens)], device=logits_NV.device)
        found: list[float] = log_probs(logits_NV[nodes], torch.tensor(tokens, device=logits_NV.device)).tolist()
        return tuple(found)
