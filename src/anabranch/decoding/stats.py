"""Decoding statistics, counted from steps; docs/metrics.md has the definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.decoding.engine import Step, Timings
from anabranch.drafting.drafter import Kind
from anabranch.drafting.expected import PREDICTION

__all__ = ["Stats"]


class Counts(Counter[Any]):
    """A Counter of which ``dataclasses.asdict`` makes a copy that JSON can store.

    It passes pairs instead of a mapping, and tuples as keys become words.
    """

    def __init__(self, items: Mapping[Any, int] | Iterable[tuple[Any, int]] = ()) -> None:
        super().__init__()
        if isinstance(items, Mapping):
            self.update(items)
        else:
            for key, count in items:
                self[" ".join(map(str, key)) if isinstance(key, tuple) else key] = count


COUNTS = (
    *("tokens", "steps", "drafted_steps", "draft_nodes", "predicted", "prefill_tokens", "cached_tokens"),
    *("seconds", "prefill_seconds", "bytes_read"),
)


@dataclass
class Stats:
    """Statistics of one sequence.

    seconds         time from the call to the last token, including ``prefill_seconds``
    prefill_tokens  prompt tokens processed in ``prefill_seconds``: all but the last, which the first step processes
    cached_tokens   prompt tokens that were not processed: their keys and values are those of an earlier text
    drafted_steps   number of steps with a draft
    draft_nodes     number of drafted nodes, before pruning
    accepted        number of steps by how many draft tokens they accepted
    sources         number of emitted tokens by what proposed them
    parts           seconds by part of a step (``Timings``), over all steps of this sequence
    calls           number of forward passes by kind, layers, and of how many (``Call.name``): the target's, and those
                    that drafters ran. A pass that several sequences share counts for each of them
    predicted       number of draft tokens from the text that was expected (``prediction``) that were verified
    bytes_read      bytes of weights that these passes read; those of a shared pass are divided among its sequences
    """

    tokens: int = 0
    steps: int = 0
    drafted_steps: int = 0
    draft_nodes: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    accepted: Counter[int] = field(default_factory=Counts)
    sources: Counter[str] = field(default_factory=Counts)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(Timings._fields, 0.0))
    calls: Counter[tuple[Kind, int, int]] = field(default_factory=Counts)
    bytes_read: float = 0.0
    predicted: int = 0

    def __repr__(self) -> str:
        rate = f"{self.decode_tokens_per_second:.1f} tokens/s"
        return f"Stats({self.tokens} tokens, {self.steps} steps, {self.mean_acceptance_length:.2f} a step, {rate})"

    @staticmethod
    def of(steps: Iterable[Step]) -> Stats:
        """The statistics of some steps of one row."""
        stats = Stats()
        for step in steps:
            stats.add(step)
        return stats

    @staticmethod
    def merged(many: Iterable[Stats]) -> Stats:
        """The sum of the statistics of several sequences."""
        total = Stats()
        for stats in many:
            for count in COUNTS:
                setattr(total, count, getattr(total, count) + getattr(stats, count))
            total.accepted.update(stats.accepted)
            total.sources.update(stats.sources)
            total.calls.update(stats.calls)
            for part in total.parts:
                total.parts[part] += stats.parts[part]
        return total

    def add(self, step: Step, kept: int | None = None) -> None:
        """Add a step, or only its first ``kept`` tokens if a stop string ended it."""
        kept = len(step.tokens) if kept is None else kept
        self.tokens += kept
        self.steps += 1
        self.drafted_steps += step.drafted > 0
        self.draft_nodes += step.drafted
        self.accepted[step.verdict.accepted] += 1
        self.predicted += step.tree.sources.count(PREDICTION)
        for source in step.sources[:kept]:
            self.sources[source] += 1
        for part, seconds in zip(step.timings._fields, step.timings, strict=True):
            self.parts[part] += seconds
        for call in step.calls:
            self.calls[call.name] += 1
            self.bytes_read += call.read

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target pass, the target's own next token included; 1 for plain decoding.

        Drafters' own passes do not count here: see ``draft_calls`` and ``bytes_read``.
        """
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def draft_calls(self) -> int:
        """Passes over decoder layers that drafters ran: of copies of the target, parts of it, and draft models."""
        return sum(count for (kind, layers, _), count in self.calls.items() if kind != "target" and layers)

    @property
    def accepted_tokens(self) -> int:
        """The number of draft tokens on accepted paths, including those cut off by the end of the text."""
        return sum(count * steps for count, steps in self.accepted.items())

    @property
    def accepted_prediction_tokens(self) -> int:
        """The number of emitted tokens that the expected text drafted."""
        return self.sources[PREDICTION]

    @property
    def rejected_prediction_tokens(self) -> int:
        """The number of verified draft tokens from the expected text that were not emitted."""
        return self.predicted - self.sources[PREDICTION]

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens divided by draft nodes, as in vLLM. Low for trees: only one sibling can be accepted."""
        return self.accepted_tokens / self.draft_nodes if self.draft_nodes else 0.0

    @property
    def draft_nodes_per_step(self) -> float:
        """Draft nodes divided by steps, including steps without a draft."""
        return self.draft_nodes / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens divided by ``seconds``, which include the prompt."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prompt was processed; all new tokens were emitted in them."""
        return max(0.0, self.seconds - self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens divided by ``decode_seconds``; 0 if nothing was decoded."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens divided by ``prefill_seconds``; 0 for a prompt of one token, which the first step processes."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    def acceptance_by_depth(self) -> list[float]:
        """The fraction of drafted steps that accepted at least 1, 2, ... draft tokens."""
        deepest = max(self.accepted, default=0)
        total = max(1, self.drafted_steps)
        return [sum(n for a, n in self.accepted.items() if a >= d) / total for d in range(1, deepest + 1)]

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON values, for --json and result files."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 3),
            "prompt_tokens_per_second": round(self.prompt_tokens_per_second, 3),
            "prefill_tokens": self.prefill_tokens,
            "cached_tokens": self.cached_tokens,
            "seconds": round(self.seconds, 6),
            "prefill_seconds": round(self.prefill_seconds, 6),
            "drafted_steps": self.drafted_steps,
            "draft_nodes": self.draft_nodes,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "predicted": self.predicted,
            "accepted": {str(count): steps for count, steps in sorted(self.accepted.items())},
            "acceptance_by_depth": [round(x, 4) for x in self.acceptance_by_depth()],
            "sources": dict(self.sources),
            "seconds_by_part": {part: round(value, 6) for part, value in self.parts.items()},
            "calls": [
                {"kind": kind, "layers": layers, "of": of, "count": count}
                for (kind, layers, of), count in sorted(self.calls.items())
            ],
            "draft_calls": self.draft_calls,
            "bytes_read": round(self.bytes_read),
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Stats:
        """The inverse of ``to_dict``."""
        return Stats(
            tokens=record["tokens"],
            steps=record["steps"],
            drafted_steps=record["drafted_steps"],
            draft_nodes=record["draft_nodes"],
            prefill_tokens=record.get("prefill_tokens", 0),
            cached_tokens=record.get("cached_tokens", 0),
            seconds=record["seconds"],
            prefill_seconds=record["prefill_seconds"],
            accepted=Counts({int(count): steps for count, steps in record["accepted"].items()}),
            sources=Counts(record["sources"]),
            parts=dict(record["seconds_by_part"]),
            calls=Counts({(one["kind"], one["layers"], one["of"]): one["count"] for one in record["calls"]}),
            bytes_read=record["bytes_read"],
            predicted=record.get("predicted", 0),
        )
