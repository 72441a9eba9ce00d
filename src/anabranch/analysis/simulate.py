"""What narrower drafts would have given, replayed from a recording without the model.

Under the rule *matching* the text does not depend on the drafts, and a draft depends on the text alone. So a recorded
draft can be cut (fewer nodes, less deep, fewer children, only the likely ones, without some source) and verified
against the recorded text, and the walk goes on where it ends:

    text      a b c d e f            recorded, at a:  b c d          cut to depth 1:  b
    recorded  a:bcd|e ...            4 tokens in a step              a:b|c  then c?

Where a recording has a draft at every position, the walk finds one at ``c``, and the replay is the decoding that the
cut drafts would have made. A recording of real steps has none there. Then two numbers are given: the *mean* judges each
recorded step by itself and takes the positions between to be like the recorded ones, and the *floor* walks and takes
every draft between to fail. For the drafts as they were recorded both are what was counted when decoding.

Best-first trees of n nodes lie within those of more nodes, so cutting nodes is what drafting fewer would have been.
Where the width was chosen at every step, the replay chooses it by the same ``Width`` and teaches it what it accepts.
Cutting depth, children or a source from a tree that a budget had cut leaves fewer nodes than drafting so would have
given: ``Prediction.filled`` tells how often the budget asked for was reached.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.analysis.theory import fitted_acceptance_rate
from anabranch.analysis.trace import Record, Row, Trace, child_ranks
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.jsonfiles import parse_json, read_text
from anabranch.methods.beliefs import Width
from anabranch.tree import DraftTree
from anabranch.verify import match

__all__ = ["Cut", "Latency", "Prediction", "overlap", "simulate"]

NOTHING = -1  # no token: the text is over


@dataclass(frozen=True)
class Cut:
    """What is left of a recorded draft; the defaults leave it as it is.

    nodes      the best that many nodes, root included
    depth      at most that deep
    k          at most that many children a node, the most believed ones
    threshold  nodes of at least that joint probability
    drop       without the nodes of these sources and what hangs on them; "stream" means all streams, "stream 3" one.
               A node that several drafters proposed counts as the one's that believed in it most
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
                raise InputError(f"{name} must be at least {low}, not {value}")
        if not 0.0 <= self.threshold < 1.0:
            raise InputError(f"threshold must be a probability of at least 0 and below 1, not {self.threshold!r}")

    def __call__(self, tree: DraftTree) -> DraftTree:
        """The cut tree. Raises CapabilityError where it takes beliefs that the tree does not carry."""
        if tree.log_probs is None and tree.size > 1 and (self.nodes is not None or self.threshold):
            raise CapabilityError(
                "this recording does not say how likely each drafted token was, so a budget of nodes or a threshold "
                "cannot be replayed; replay other depths or k"
            )
        beliefs = np.zeros(tree.size) if tree.log_probs is None else tree.log_probs
        floor = math.log(self.threshold) if self.threshold else -math.inf
        kept = np.zeros(tree.size, np.bool_)
        kept[0] = True
        for parent in range(tree.size):
            if not kept[parent] or (self.depth is not None and tree.depths[parent] >= self.depth):
                continue
            children = [c for c in tree.children(parent) if not self._dropped(tree.sources[c]) and beliefs[c] >= floor]
            kept[sorted(children, key=lambda child: -beliefs[child])[: self.k]] = True
        if not kept.all():
            tree = tree.select(kept.nonzero()[0])
        return tree if self.nodes is None or tree.size <= self.nodes else tree.truncate(self.nodes)

    def _dropped(self, source: str) -> bool:
        return any(source == name or source.startswith(f"{name} ") for name in self.drop)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a whole step by the width of its tree, widths ascending; between them it is linear."""

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    @staticmethod
    def read(path: Path) -> Latency:
        """From JSON ``{"1": 10.2, "16": 14.0}`` or from lines ``width,ms``. Raises FileError."""
        try:
            text = read_text(path, "give lines width,ms or JSON")
            pairs = parse_json(text).items() if text.lstrip().startswith("{") else _lines(text)
            table = sorted((int(width), float(ms)) for width, ms in pairs)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise FileError(f'{path} is no latency table; write lines "width,ms" or JSON {{"1": 10.2}}') from error
        if not table or any(width < 1 or not 0 < ms < math.inf for width, ms in table):
            raise FileError(f"{path} is no latency table: widths start at 1 and milliseconds are positive")
        return Latency(tuple(w for w, _ in table), tuple(ms for _, ms in table))

    @staticmethod
    def of(trace: Trace, *, least: int = 3) -> Latency | None:
        """Medians over the widths that at least ``least`` steps of a recording had; None where nothing was verified."""
        if trace.every_position:
            return None
        found: dict[int, list[float]] = {}
        for record in trace:
            found.setdefault(record.tree.size, []).append(1e3 * record.timings.total)
        table = sorted((width, float(np.median(ms))) for width, ms in found.items() if len(ms) >= least)
        return Latency(tuple(w for w, _ in table), tuple(ms for _, ms in table)) if table else None

    def __call__(self, width: int) -> float | None:
        """Milliseconds; None for a width outside of the table."""
        inside = self.widths[0] <= width <= self.widths[-1]
        return float(np.interp(width, self.widths, self.ms)) if inside else None


@dataclass
class Prediction:
    """What the drafts of a ``Cut`` give, or would have given. Counts as in docs/metrics.md.

    accepted  steps by the number of draft tokens they accepted
    ranks     accepted draft tokens by their place among their siblings
    floor     mean acceptance length if all drafts between recorded positions failed; None: nothing was between
    filled    share of drafted steps that reached the budget of nodes asked for
    ms        of all steps, by a latency table; None without one, or where it does not reach
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
        """Tokens a step."""
        return self.tokens / max(1, self.steps)

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding alone, without reading the prompt."""
        return None if not self.ms else 1e3 * self.tokens / self.ms

    @property
    def filled(self) -> float | None:
        """See above; None where no budget was asked for."""
        return None if self.cut.nodes is None else self.full / max(1, self.drafted_steps)

    @property
    def alpha(self) -> float | None:
        """Leviathan et al.'s acceptance rate that fits the accepted counts; None without drafts."""
        drafted = [(found, depth) for found, depth in self.depths if depth]
        return fitted_acceptance_rate(*zip(*drafted, strict=True)) if drafted else None

    def acceptance_by_depth(self) -> list[float]:
        """Share of the steps with a draft that accepted at least 1, 2, ... draft tokens."""
        total, deepest = max(1, self.drafted_steps), max(self.accepted, default=0)
        return [sum(n for a, n in self.accepted.items() if a >= d) / total for d in range(1, deepest + 1)]

    def add(self, tree: DraftTree, path: Sequence[int], emitted: int, latency: Latency | None) -> None:
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
        """For --json."""
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


def simulate(
    trace: Trace, cut: Cut | None = None, *, latency: Latency | None = None, width: Width | None = None
) -> Prediction:
    """Replay a recording with cut drafts.

    ``width`` chooses how many nodes of what ``cut`` left are verified, step by step, as ``CombinedDrafter`` does; it
    needs a draft at every position.

    Raises CapabilityError for a cut that the recording cannot tell about: one of the rule *rejection* can only be cut
    in depth and in k, which leaves the law of every trial as it was.
    """
    cut = cut or Cut()
    if trace.rule == "rejection" and (cut.nodes is not None or cut.threshold or cut.drop):
        raise CapabilityError(
            "under rule='rejection' a draft without some of its tokens would have been judged otherwise; replay other "
            "depths or k, or record with rule='match'"
        )
    if width is not None and not trace.every_position:
        raise CapabilityError(
            "widths that are chosen step by step can only be replayed where every position has a draft; record with "
            "--every-position"
        )
    told, floor = Prediction(cut, ms=None if latency is None else 0.0), Prediction(cut)
    between = False
    for row in trace.rows():
        visited = list(_walk(row, cut, width))
        for _, tree, path, emitted in visited if trace.every_position else _each(row, cut):
            told.add(tree, path, emitted, latency)
        for record, tree, path, emitted in visited:
            floor.add(tree, path, emitted, None)
            between = between or record is None
    if between:
        told.floor = floor.mean_acceptance_length
    return told


def overlap(trace: Trace) -> float | None:
    """alpha as the mean of sum_x min(p(x), q(x)) over what *rejection* judged; None where p and q were not recorded."""
    found = [value for record in trace if record.judged is not None for value in record.judged.overlap]
    return float(np.mean(found)) if found else None


Visit = tuple[Record | None, DraftTree, tuple[int, ...], int]


def _walk(row: Row, cut: Cut, width: Width | None) -> Iterator[Visit]:
    """Decode the row's text with cut drafts, from where each step ends; without a record nothing is drafted."""
    records = {record.at: record for record in row.records}
    at, end = 0, len(row.tokens)
    while at < end:
        record = records.get(at)
        tree = DraftTree.root(NOTHING) if record is None else _draft(record, cut)
        if width is not None:
            (tree,) = width([row.records[0].row], [tree])
        path = _match(tree, row.said[at:])
        if width is not None:
            width.learn(row.records[0].row, tree, path)
        yield record, tree, path, min(len(path), end - at)
        at += len(path)
    if width is not None:
        width.forget(row.records[0].row)


def _each(row: Row, cut: Cut) -> Iterator[Visit]:
    """Each recorded step by itself."""
    end = len(row.tokens)
    for record in row.records:
        tree = _draft(record, cut)
        path = _match(tree, row.said[record.at :])
        yield record, tree, path, min(len(path), end - record.at)


def _draft(record: Record, cut: Cut) -> DraftTree:
    """The cut draft, no deeper than what may still be emitted."""
    tree = cut(record.tree)
    if record.room is None or tree.max_depth <= record.room:
        return tree
    return tree.select((tree.depths <= record.room).nonzero()[0])


def _match(tree: DraftTree, text: Sequence[int]) -> tuple[int, ...]:
    """The path of ``tree`` that a target accepts whose own words after the root are ``text``."""
    return match(tree, [text[depth] if depth < len(text) else NOTHING for depth in tree.depths.tolist()]).path


def _lines(text: str) -> list[tuple[str, str]]:
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if rows and not rows[0][0].strip().isdigit():
        rows = rows[1:]  # column names
    return [(width, ms) for width, ms in rows]
