"""Replay a recording with smaller drafts, without the model.

With the rule *matching* the text does not depend on the drafts, and a draft depends only on the text. So a recorded
draft can be cut (fewer nodes, smaller depth, fewer children, a probability threshold, a source left out) and verified
against the recorded text; the replay continues where the accepted path ends:

    text      a b c d e f            recorded, at a:  b c d          cut to depth 1:  b
    recorded  a:bcd|e ...            4 tokens in a step              a:b|c  then c?

If a recording has a draft at every position, there is one at ``c``, and the replay is exactly the decoding with the cut
drafts. A recording of real steps has none there, and two numbers are given: the *mean* evaluates each recorded step by
itself, assuming that positions in between are like the recorded ones; the *floor* replays the text, assuming that every
draft in between is rejected. For uncut drafts both equal the statistics of the decoding.

The best n nodes of a best-first tree are the best-first tree of n nodes, so cutting nodes equals drafting fewer.
``Ranking`` replays drafters that choose the verified nodes at every step: it calibrates the recorded probabilities by
acceptance (``drafting.acceptance``), as decoding does. If a budget limited the recorded tree, cutting its depth,
children or a source leaves fewer nodes than drafting that way; ``Prediction.filled`` is the share of steps that reached
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.analysis.theory import fitted_acceptance_rate
from anabranch.analysis.trace import Trace, TraceRecord, TraceRow, child_ranks
from anabranch.control.controller import best_count
from anabranch.drafting.acceptance import Acceptance, best_nodes, merge
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.support.jsonfiles import parse_json, read_text
from anabranch.tree import DraftTree
from anabranch.verify import match

__all__ = ["Cut", "Latency", "Prediction", "Ranking", "merged", "overlap", "replay", "simulate"]

NOTHING = -1  # no token: the end of the text
Price = Callable[[int], "float | None"]  # milliseconds of a step by the nodes that it verifies; None: unknown


@dataclass(frozen=True)
class Cut:
    """Limits that cut a recorded draft; the defaults leave it unchanged.

    nodes      keep at most this many nodes, the most probable ones, counting the root
    depth      maximum depth
    k          keep at most this many children of a node, the most probable ones
    threshold  drop nodes with a lower joint probability
    drop       drop the nodes of these sources and their descendants; a name without its number stands for the whole
               group. A node that several drafters proposed has the source that gave it the highest probability
    """

    nodes: int | None = None
    depth: int | None = None
    k: int | None = None
    threshold: float = 0.0
    drop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, low in (("nodes", 1), ("depth", 0), ("k", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"{name} must be at least {low}, got {value}")
        if not 0.0 <= self.threshold < 1.0:
            raise InputError(f"threshold must be a probability of at least 0 and below 1, got {self.threshold!r}")

    def __call__(self, tree: DraftTree) -> DraftTree:
        """The cut tree. Raises CapabilityError if that requires probabilities and the tree has none."""
        if tree.log_probs is None and tree.size > 1 and (self.nodes is not None or self.threshold):
            raise CapabilityError(
                "this recording has no probabilities of drafted tokens, so a budget of nodes or a threshold cannot be "
                "replayed; replay other depths or k"
            )
        log_probs = np.zeros(tree.size) if tree.log_probs is None else tree.log_probs
        floor = math.log(self.threshold) if self.threshold else -math.inf
        kept = np.zeros(tree.size, np.bool_)
        kept[0] = True
        for parent in range(tree.size):
            if not kept[parent] or (self.depth is not None and tree.depths[parent] >= self.depth):
                continue
            children = [
                c for c in tree.children(parent) if not self._dropped(tree.sources[c]) and log_probs[c] >= floor
            ]
            kept[sorted(children, key=lambda child: -log_probs[child])[: self.k]] = True
        if not kept.all():
            tree = tree.select(kept.nonzero()[0])
        return tree if self.nodes is None or tree.size <= self.nodes else tree.truncate(self.nodes)

    def _dropped(self, source: str) -> bool:
        return any(source == name or source.startswith(f"{name} ") for name in self.drop)


@dataclass(frozen=True)
class Ranking:
    """Choose the nodes to verify by their calibrated probabilities, as decoding does for one sequence.

    nodes  maximum number of nodes of a tree, counting the root
    ms     [nodes] milliseconds of a step that verifies 1, 2, ... nodes: the number of nodes with the most expected
           tokens per millisecond is verified; None: always ``nodes``
    """

    nodes: int
    ms: Sequence[float] | None = None

    def __call__(self, tree: DraftTree, acceptance: Acceptance) -> DraftTree:
        """The chosen nodes of a drafted tree."""
        calibrated = acceptance(tree)
        count = self.nodes
        if self.ms is not None:
            count = best_count(sorted(calibrated[1:], reverse=True)[: self.nodes - 1], self.ms)
        return best_nodes(tree, calibrated, count)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a whole step by the number of verified nodes (ascending), interpolated linearly."""

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    @staticmethod
    def read(path: Path) -> Latency:
        """Read JSON ``{"1": 10.2, "16": 14.0}`` or lines ``width,ms``. Raises FileError."""
        try:
            text = read_text(path, "give lines width,ms or JSON")
            pairs = parse_json(text).items() if text.lstrip().startswith("{") else _lines(text)
            table = sorted((int(width), float(ms)) for width, ms in pairs)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise FileError(f'{path} is not a latency table; write lines "width,ms" or JSON {{"1": 10.2}}') from error
        if not table or any(width < 1 or not 0 < ms < math.inf for width, ms in table):
            raise FileError(f"{path} is not a latency table: widths must be at least 1 and milliseconds positive")
        return Latency(tuple(w for w, _ in table), tuple(ms for _, ms in table))

    @staticmethod
    def of(trace: Trace, *, least: int = 3) -> Latency | None:
        """Medians by number of verified nodes, for those with ``least`` steps or more; None if nothing was verified."""
        if trace.every_position:
            return None
        timed: dict[int, list[float]] = {}
        for record in trace:
            timed.setdefault(record.tree.size, []).append(1e3 * record.timings.total)
        table = sorted((width, float(np.median(ms))) for width, ms in timed.items() if len(ms) >= least)
        return Latency(tuple(w for w, _ in table), tuple(ms for _, ms in table)) if table else None

    def __call__(self, width: int) -> float | None:
        """Milliseconds; None for a width outside the table."""
        inside = self.widths[0] <= width <= self.widths[-1]
        return float(np.interp(width, self.widths, self.ms)) if inside else None


@dataclass
class Prediction:
    """The result of a replay with cut drafts; docs/metrics.md defines the counts.

    accepted  number of steps by how many draft tokens they accepted
    ranks     number of accepted draft tokens by their rank among their siblings
    floor     mean acceptance length if all drafts between recorded positions are rejected; None: there are none
    filled    fraction of drafted steps that reached the requested budget of nodes
    ms        total of all steps from a latency table; None without one, or if it does not cover a step
    """

    cut: Cut
    tokens: int = 0
    steps: int = 0
    draft_nodes: int = 0
    drafted_steps: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    depths: list[tuple[int, int]] = field(default_factory=list)
    floor: float | None = None
    full: int = 0
    ms: float | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per step, including the target's own."""
        return self.tokens / max(1, self.steps)

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed, without the time for prompts."""
        return None if not self.ms else 1e3 * self.tokens / self.ms

    @property
    def filled(self) -> float | None:
        """The share of drafted steps that reached the budget; None without a budget."""
        return None if self.cut.nodes is None else self.full / max(1, self.drafted_steps)

    @property
    def alpha(self) -> float | None:
        """Leviathan et al.'s acceptance rate, fitted to the accepted counts; None without drafts."""
        drafted = [(accepted, depth) for accepted, depth in self.depths if depth]
        return fitted_acceptance_rate(*zip(*drafted, strict=True)) if drafted else None

    def acceptance_by_depth(self) -> list[float]:
        """The fraction of drafted steps that accepted at least 1, 2, ... draft tokens."""
        total, deepest = max(1, self.drafted_steps), max(self.accepted, default=0)
        return [sum(n for a, n in self.accepted.items() if a >= d) / total for d in range(1, deepest + 1)]

    def add(self, tree: DraftTree, path: Sequence[int], emitted: int, latency: Price | None) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += emitted
        self.draft_nodes += tree.size - 1
        self.drafted_steps += tree.size > 1
        self.full += tree.size > 1 and tree.size == self.cut.nodes
        self.accepted[len(path) - 1] += 1
        self.ranks.update(child_ranks(tree, path))
        self.depths.append((len(path) - 1, tree.max_depth))
        if self.ms is not None and latency is not None:
            ms = latency(tree.size)
            self.ms = None if ms is None else self.ms + ms

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for --json."""
        cut = {name: getattr(self.cut, name) for name in ("nodes", "depth", "k", "threshold")}
        rounded = {
            name: None if value is None else round(value, 4)
            for name, value in {
                "mean_acceptance_length": self.mean_acceptance_length,
                "floor": self.floor,
                "tokens_per_second": self.tokens_per_second,
                "filled": self.filled,
                "alpha": self.alpha,
            }.items()
        }
        return {
            "cut": cut | {"drop": list(self.cut.drop)},
            "tokens": self.tokens,
            "steps": self.steps,
            **rounded,
            "draft_nodes_per_step": round(self.draft_nodes / max(1, self.steps), 3),
            "accepted": {str(count): steps for count, steps in sorted(self.accepted.items())},
            "acceptance_by_depth": [round(share, 4) for share in self.acceptance_by_depth()],
            "ranks": {str(rank): count for rank, count in sorted(self.ranks.items())},
        }


def simulate(trace: Trace, cut: Cut | None = None, *, latency: Price | None = None) -> Prediction:
    """Replay a recording with cut drafts.

    Raises CapabilityError for a cut that cannot be replayed: with the rule *rejection* only depth and k can be cut,
    which does not change the distribution of any trial.
    """
    cut = cut or Cut()
    if trace.rule == "rejection" and (cut.nodes is not None or cut.threshold or cut.drop):
        raise CapabilityError(
            "with rule='rejection' a draft without some of its tokens would have been verified differently; replay "
            "other depths or k, or record with rule='match'"
        )
    if trace.every_position:
        return replay(trace.rows(), cut, latency=latency)
    mean, floor = Prediction(cut, ms=None if latency is None else 0.0), Prediction(cut)
    between = False
    for row in trace.rows():
        for tree, path, emitted in _each(row, cut):
            mean.add(tree, path, emitted, latency)
        for record, tree, path, emitted in _walk(row, cut, None):
            floor.add(tree, path, emitted, None)
            between = between or record is None
    if between:
        mean.floor = floor.mean_acceptance_length
    return mean


def replay(
    rows: Sequence[TraceRow],
    cut: Cut | None = None,
    *,
    latency: Price | None = None,
    ranking: Ranking | None = None,
) -> Prediction:
    """Replay sequences recorded at every position with cut drafts, of which ``ranking`` chooses the verified nodes."""
    prediction = Prediction(cut or Cut(), ms=None if latency is None else 0.0)
    for row in rows:
        for record, tree, path, emitted in _walk(row, prediction.cut, ranking):
            assert record is not None, "every position was recorded"
            prediction.add(tree, path, emitted, latency)
    return prediction


def merged(rows: Sequence[TraceRow], cuts: Sequence[Cut]) -> TraceRow:
    """Merge recordings of one text at every position, each with its own cut, into a recording of the merged trees."""
    records = []
    for parts in zip(*(row.records for row in rows), strict=True):
        trees = [_draft(record, cut) for record, cut in zip(parts, cuts, strict=True)]
        records.append(replace(parts[0], tree=merge(trees), max_depth=None))
    return TraceRow(tuple(records))


def overlap(trace: Trace) -> float | None:
    """alpha as the mean of sum_x min(p(x), q(x)) over all *rejection* trials; None if p and q were not recorded."""
    overlaps = [value for record in trace if record.judged is not None for value in record.judged.overlap]
    return float(np.mean(overlaps)) if overlaps else None


def _walk(
    row: TraceRow, cut: Cut, ranking: Ranking | None
) -> Iterator[tuple[TraceRecord | None, DraftTree, tuple[int, ...], int]]:
    """Replay the row's text with cut drafts; positions without a record have no draft.

    Yields (record, verified tree, accepted path, emitted tokens) for each step.
    """
    records, acceptance = {record.at: record for record in row.records}, Acceptance()
    decided, at, end = row.decided, 0, len(row.tokens)
    while at < end:
        record = records.get(at)
        tree = DraftTree.root(NOTHING) if record is None else _draft(record, cut)
        if ranking is not None:
            tree = ranking(tree, acceptance)
        path = _match(tree, decided[at:])
        if ranking is not None and tree.size > 1:
            acceptance.learn(tree, path)
        yield record, tree, path, min(len(path), end - at)
        at += len(path)


def _each(row: TraceRow, cut: Cut) -> Iterator[tuple[DraftTree, tuple[int, ...], int]]:
    """Yield (verified tree, accepted path, emitted tokens) of each recorded step by itself."""
    decided, end = row.decided, len(row.tokens)
    for record in row.records:
        tree = _draft(record, cut)
        path = _match(tree, decided[record.at :])
        yield tree, path, min(len(path), end - record.at)


def _draft(record: TraceRecord, cut: Cut) -> DraftTree:
    """The cut draft, no deeper than the rest of the text."""
    tree = cut(record.tree)
    if record.max_depth is None or tree.max_depth <= record.max_depth:
        return tree
    return tree.select((tree.depths <= record.max_depth).nonzero()[0])


def _match(tree: DraftTree, text: Sequence[int]) -> tuple[int, ...]:
    """The accepted path of ``tree`` if the target's own tokens after the root are ``text``."""
    return match(tree, [text[depth] if depth < len(text) else NOTHING for depth in tree.depths.tolist()]).path


def _lines(text: str) -> list[tuple[str, str]]:
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if rows and not rows[0][0].strip().isdigit():
        rows = rows[1:]  # column names
    return [(width, ms) for width, ms in rows]
