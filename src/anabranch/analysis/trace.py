"""Traces of decoding: one JSON line per step, written during decoding and readable after a crash.

    {"trace": 2, "rule": "match", "every_position": false, "settings": {...}}  the first line
    {"source": "head 1"}                                                         names source 1; 0 is "target"
    {"row": 0, "at": 3, "tokens": [7, 9], "parents": [-1, 0], "sources": [0, 1], "log_probs": [0.0, -0.2],
     "path": [0, 1], "next": 5, "kept": 2, "drafted": 1, "ms": [0.4, 9.1, 0.1, 0.6]}                    a step

A trace contains token ids and no text. There are three ways to record one:

as it decodes    ``writer.add(step)`` for every step of an engine
with p and q     with the engine's drafter ``writer.watch(drafter, target)``, to record the probabilities that
                 *rejection* compared
every position   the same with ``TraceWriter(..., every_position=True)``: drafts are recorded at every position of the
                 text but not verified. This is as slow as plain decoding, but allows exact replays of smaller drafts
                 (``simulate``)
"""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO, cast

import numpy as np
import torch

from anabranch.decoding.engine import FinishReason, Step, Timings
from anabranch.drafting.combined import ChoiceDrafter
from anabranch.drafting.drafter import Drafter, Observation, Row, altered
from anabranch.errors import CapabilityError, FileError
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.sampling import SamplingParams, target_probs
from anabranch.support.jsonfiles import is_number, is_whole, parse_json, parse_object, read_lines, shown
from anabranch.tree import DraftTree
from anabranch.verify import Rule, Verdict

__all__ = [
    "Judged",
    "Trace",
    "TraceRecord",
    "TraceRow",
    "TraceWriter",
    "Watched",
    "child_ranks",
    "read_trace",
    "step_fields",
]

VERSION = 2
UNLIMITED = 1 << 20  # deeper than any draft


@dataclass(frozen=True)
class Judged:
    """The probabilities that the rule *rejection* compared in one step.

    p, q     [N - 1] the target's and the drafter's probability of each drafted token, given its parent
    overlap  sum_x min(p(x), q(x)) at each node of the accepted path that has children, starting at the root
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    overlap: tuple[float, ...]


@dataclass(frozen=True)
class TraceRecord:
    """One recorded step of row ``row``, whose first token has index ``at`` among the row's new tokens.

    tree       the draft: as verified, or unverified if every position was recorded
    verdict    the accepted path and the target's own next token
    kept       number of emitted tokens; fewer than the path and the next token if the row was cut off
    drafted    number of drafted nodes, before pruning
    max_depth  if every position was recorded, the maximum useful depth this close to the end of the text, to which
               ``tree`` is not cut; None: ``tree`` was cut when it was drafted
    """

    row: int
    at: int
    tree: DraftTree
    verdict: Verdict
    kept: int
    drafted: int
    timings: Timings
    finish: FinishReason | None = None
    judged: Judged | None = None
    max_depth: int | None = None

    @property
    def decided(self) -> tuple[int, ...]:
        """The accepted tokens and the target's own, including those that were cut off."""
        return (*(int(self.tree.tokens[node]) for node in self.verdict.path[1:]), self.verdict.next_token)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Emitted tokens."""
        return self.decided[: self.kept]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each accepted node among its siblings; 0: the most probable."""
        return child_ranks(self.tree, self.verdict.path)


@dataclass(frozen=True)
class TraceRow:
    """The steps of one sequence, in order."""

    records: tuple[TraceRecord, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All emitted tokens."""
        return tuple(token for record in self.records for token in record.tokens)

    @property
    def decided(self) -> tuple[int, ...]:
        """All emitted tokens, and those of the last step that were cut off."""
        return (*(token for record in self.records[:-1] for token in record.tokens), *self.records[-1].decided)


@dataclass(frozen=True)
class Trace:
    """A trace on disk. Iterating yields the steps in decoding order; ``rows`` groups them by sequence."""

    path: Path
    settings: Mapping[str, Any]
    rule: Rule
    every_position: bool

    def __iter__(self) -> Iterator[TraceRecord]:
        """The records in order. Skips an incomplete last line with a warning; FileError for other bad lines."""
        sources = ["target"]
        for number, line in read_lines(self.path):
            if number == 1:
                continue
            try:
                fields = parse_json(line)
            except ValueError as error:
                if line.endswith("\n"):
                    raise FileError(
                        f"line {number} of {self.path} is not JSON ({error}); record the trace again"
                    ) from error
                warnings.warn(f"the last record of {self.path} is incomplete and was skipped", stacklevel=2)
                return
            try:
                if "source" in fields:
                    sources.append(str(fields["source"]))
                    continue
                record = _record(fields, sources)
            except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise FileError(f"line {number} of {self.path} is not a step; record the trace again") from error
            yield record

    def sources(self) -> list[str]:
        """The sources of drafted tokens, in order of appearance."""
        return list(dict.fromkeys(source for record in self for source in record.tree.sources[1:]))

    def rows(self) -> list[TraceRow]:
        """The recorded sequences, in the order in which they started."""
        rows: dict[int, list[TraceRecord]] = {}
        for record in self:
            rows.setdefault(record.row, []).append(record)
        return [TraceRow(tuple(records)) for records in rows.values()]


def read_trace(path: Path) -> Trace:
    """Open a trace. Raises FileError if there is none, or if it has another version."""
    advice = "record one with 'anabranch generate ... --trace FILE'"
    number, line = next(read_lines(path), (1, ""))
    header = parse_object(line, f"line {number} of {path}", f"{path} is not a trace; {advice}")
    if "trace" in header and header["trace"] != VERSION:
        raise FileError(
            f"{path} is a trace of version {shown(header['trace'])}, but this anabranch reads version {VERSION}; "
            "record it again"
        )
    settings, every_position = header.get("settings"), header.get("every_position")
    right = "trace" in header and isinstance(settings, dict) and isinstance(every_position, bool)
    if not right or header.get("rule") not in ("match", "rejection"):
        raise FileError(f"{path} is not a trace; {advice}")
    return Trace(path, settings, header["rule"], every_position)


def step_fields(step: Step, tree: DraftTree, *, at: int, kept: int) -> dict[str, Any]:
    """A step as a trace has it, as JSON values, but with the names of sources.

    tree  the draft, as in ``TraceRecord``
    """
    fields: dict[str, Any] = {
        "at": at,
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "sources": list(tree.sources),
        "path": list(step.verdict.path),
        "next": step.verdict.next_token,
        "kept": kept,
        "drafted": step.drafted,
        "ms": [round(1e3 * s, 4) for s in step.timings],
    }
    if tree.log_probs is not None:
        fields["log_probs"] = [_number(value) for value in tree.log_probs]
    if step.finish is not None:
        fields["finish"] = step.finish
    return fields


class TraceWriter:
    """Writes a trace, flushed after every step; also a context manager.

    settings        settings of the recording, as JSON values for the first line
    rule            the verification rule
    every_position  record drafts without verifying them; the engine's drafter must be a ``watch``ed one

    Raises FileError if ``path`` exists or cannot be written.
    """

    def __init__(
        self, path: Path, *, settings: Mapping[str, Any], rule: Rule = "match", every_position: bool = False
    ) -> None:
        self.path, self.every_position = path, every_position
        self._watched: list[Watched] = []
        self._sources = {"target": 0}
        self._emitted: dict[int, int] = {}
        if path.exists():
            raise FileError(f"{path} exists already; give the trace another name, or remove it first")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("x", encoding="utf-8")
        except OSError as error:
            raise FileError(f"the trace {path} cannot be written ({error.strerror}); choose another path") from error
        header = {"trace": VERSION, "rule": rule, "every_position": every_position}
        self._write({**header, "settings": dict(settings)})

    def watch(self, drafter: Drafter, target: Decoder | None = None) -> Drafter:
        """The drafter for an engine whose steps are added here: a copy, or of several to choose from that of the first.

        With the ``target``, the probabilities that the rule *rejection* compared are recorded too, at the cost of one
        more pass through its head per step.
        """
        watched = Watched(drafter, target, every_position=self.every_position)
        self._watched.append(watched)
        return watched.drafter

    def add(self, step: Step, kept: int | None = None) -> None:
        """Append a step, of which only ``kept`` tokens were emitted if a stop string cut it."""
        seen = next((taken for w in self._watched if (taken := w.take(step.row)) is not None), None)
        tree, judged, max_depth = (step.tree, None, None) if seen is None else seen
        for source in tree.sources:
            if source not in self._sources:
                self._sources[source] = len(self._sources)
                self._write({"source": source})
        at = self._emitted.get(step.row, 0)
        kept = len(step.tokens) if kept is None else kept
        fields = {"row": step.row, **step_fields(step, tree, at=at, kept=kept)}
        fields["sources"] = [self._sources[source] for source in tree.sources]
        if self.every_position:
            fields["drafted"] = tree.size - 1
        if max_depth is not None:
            fields["max_depth"] = max_depth
        if judged is not None:
            fields |= {name: [_number(x) for x in getattr(judged, name)] for name in ("p", "q", "overlap")}
        self._write(fields)
        self._emitted[step.row] = at + kept
        if step.finish is not None:
            del self._emitted[step.row]

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Seen(NamedTuple):
    tree: DraftTree
    judged: Judged | None
    max_depth: int | None


class Watched:
    """Keeps a drafter's trees and probabilities for a trace; ``drafter`` is a copy that reports here."""

    def __init__(self, drafter: Drafter, target: Decoder | None = None, *, every_position: bool = False) -> None:
        drafter = drafter.drafters[0] if isinstance(drafter, ChoiceDrafter) else drafter
        self.target, self.every_position, self._kind = target, every_position, type(drafter)
        adaptive = drafter.adaptive and not every_position
        self.drafter = altered(drafter, check=self._check, draft=self._draft, observe=self._observe, adaptive=adaptive)
        self._drafted: dict[Row, _Seen] = {}  # at every position, before they are observed
        self._seen: dict[int, deque[_Seen]] = {}

    def _check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """Check the drafter; recording every position does not support *rejection*, which needs verified drafts."""
        if self.every_position and rule == "rejection":
            raise CapabilityError(
                "recording every position verifies no drafts, but rule='rejection' can only replay verified ones; "
                "use rule='match', or record as it decodes"
            )
        self._kind.check(self.drafter, sampling, rule, source)

    def _draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The drafter's trees; if every position is recorded, they are kept and roots are returned instead."""
        if not self.every_position:
            return self._kind.draft(self.drafter, rows, budget)
        depths = [row.max_depth for row in rows]
        for row in rows:
            # full depth, since the drafts are not verified; a replay cuts them at the end of the text
            row.max_depth = UNLIMITED if row.max_depth > 0 else 0
        trees = self._kind.draft(self.drafter, rows, self.drafter.max_nodes)
        for row, tree, depth in zip(rows, trees, depths, strict=True):
            row.max_depth, self._drafted[row] = depth, _Seen(tree, None, max(0, depth))
        return [DraftTree.root(row.root) for row in rows]

    def _observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep drafts and probabilities, and let the drafter observe."""
        for row, slot, tree, verdict in zip(rows, seen.slots, seen.trees, seen.verdicts, strict=True):
            kept = _Seen(tree, None, None)
            if self.every_position:
                kept = self._drafted.pop(row)
            elif self.target is not None and row.rule == "rejection" and tree.draft_probs is not None:
                logits_NV = self.target.logits(seen.result.hidden_MD[seen.result.nodes(slot)])
                kept = _Seen(tree, _judge(tree, verdict, logits_NV, row.sampling), None)
            self._seen.setdefault(row.id, deque()).append(kept)
        budget = self.drafter.max_nodes if self.every_position else seen.budget
        self._kind.observe(self.drafter, rows, seen._replace(budget=budget))

    def take(self, row: int) -> _Seen | None:
        """Remove and return the record of a row's oldest step; None if the row is not watched."""
        waiting = self._seen.get(row)
        if not waiting:
            return None
        oldest = waiting.popleft()
        if not waiting:
            del self._seen[row]
        return oldest


def child_ranks(tree: DraftTree, path: Sequence[int]) -> tuple[int, ...]:
    """The rank of each node of ``path`` except the root among its siblings, by log probability, or else by order.

    9 (0) +-- 1 (1: -0.7)    child_ranks(tree, (0, 1)) is (1,): its sibling is more probable
          +-- 2 (2: -0.5)
    """
    log_probs = np.zeros(tree.size) if tree.log_probs is None else tree.log_probs
    ranks = []
    for parent, node in pairwise(path):
        siblings = sorted(tree.children(parent), key=lambda child: -log_probs[child])
        ranks.append(siblings.index(node))
    return tuple(ranks)


def _judge(tree: DraftTree, verdict: Verdict, logits_NV: torch.Tensor, sampling: SamplingParams) -> Judged:
    assert tree.draft_probs is not None
    p_NV, q_NV = target_probs(logits_NV, sampling), tree.draft_probs
    parents, tokens = torch.from_numpy(tree.parents[1:]), torch.from_numpy(tree.tokens[1:])
    inner = torch.tensor([node for node in verdict.path if tree.children(node)], dtype=torch.long)
    overlap = torch.minimum(p_NV[inner], q_NV[inner]).sum(-1)
    return Judged(tuple(p_NV[parents, tokens].tolist()), tuple(q_NV[parents, tokens].tolist()), tuple(overlap.tolist()))


def _number(value: float) -> float | None:
    """The shortest decimal that rounds to this float32; None for minus infinity, which JSON lacks."""
    return None if value == -math.inf else float(str(np.float32(value)))


def _record(fields: Mapping[str, Any], sources: Sequence[str]) -> TraceRecord:
    """Parse a step written by ``TraceWriter``. Other records raise ValueError, TypeError, KeyError and the like."""
    given = fields.get("log_probs")
    tree = DraftTree(
        np.asarray(_wholes(fields["tokens"]), np.int64),
        np.asarray(_wholes(fields["parents"], -1), np.int64),
        sources=tuple(sources[source] for source in _wholes(fields["sources"])),
        log_probs=None if given is None else np.asarray([-math.inf if x is None else x for x in given], np.float32),
    )
    path = tuple(_wholes(fields["path"]))
    if path[0] != 0 or any(tree.parents[child] != parent for parent, child in pairwise(path)):
        raise ValueError("the path leaves the tree")
    row, at, following, kept, drafted = _wholes([fields[name] for name in ("row", "at", "next", "kept", "drafted")])
    if kept > len(path):
        raise ValueError("more tokens kept than decided")
    milliseconds = _numbers(fields["ms"])
    finish, max_depth = fields.get("finish"), fields.get("max_depth")
    known = finish in (None, "stop", "length") and (max_depth is None or is_whole(max_depth, 0))
    if len(milliseconds) != len(Timings._fields) or not known:
        raise ValueError("timings, finish or max_depth")
    judged = None
    if "p" in fields:
        judged = Judged(*(tuple(_numbers(fields[name])) for name in ("p", "q", "overlap")))
    return TraceRecord(
        row,
        at,
        tree,
        Verdict(path, following),
        kept,
        drafted,
        Timings(*(1e-3 * ms for ms in milliseconds)),
        cast("FinishReason | None", finish),
        judged,
        max_depth,
    )


def _wholes(values: Any, low: int = 0) -> list[int]:
    if not isinstance(values, list) or not all(is_whole(value, low) for value in values):
        raise TypeError("not a list of whole numbers")
    return values


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list) or not all(is_number(value, 0) for value in values):
        raise TypeError("not a list of numbers")
    return values
