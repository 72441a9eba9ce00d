"""What a decoding did, counted from its steps; docs/metrics.md has the definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.engine import Step

__all__ = ["Stats"]

COUNTS = ("tokens", "steps", "drafted_steps", "draft_nodes", "prefill_tokens", "seconds", "prefill_seconds")


@dataclass
class Stats:
    """Counts of one sequence. ``seconds`` run from the call to the last token, ``prefill_seconds`` inside it.

    prefill_tokens  prompt tokens read in ``prefill_seconds``: all but the last, which the first step reads
    drafted_steps  steps with a draft, draft_nodes the nodes that were drafted in all, before pruning
    accepted   steps by the number of draft tokens they accepted
    sources    emitted tokens by who proposed them
    parts      seconds by part of a step: draft, forward, verify, commit (of the steps this sequence took part in)
    """

    tokens: int = 0
    steps: int = 0
    drafted_steps: int = 0
    draft_nodes: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(
        default_factory=lambda: {"draft": 0.0, "forward": 0.0, "verify": 0.0, "commit": 0.0}
    )

    @staticmethod
    def of(steps: Iterable[Step]) -> Stats:
        """Count some steps of one row."""
        stats = Stats()
        for step in steps:
            stats.add(step)
        return stats

    @staticmethod
    def merged(many: Iterable[Stats]) -> Stats:
        """The counts of several sequences together."""
        whole = Stats()
        for one in many:
            for count in COUNTS:
                setattr(whole, count, getattr(whole, count) + getattr(one, count))
            whole.accepted.update(one.accepted)
            whole.sources.update(one.sources)
            for part in whole.parts:
                whole.parts[part] += one.parts[part]
        return whole

    def add(self, step: Step, kept: int | None = None) -> None:
        """Count one more step; ``kept`` of its tokens, where a stop string cut it."""
        kept = len(step.tokens) if kept is None else kept
        self.tokens += kept
        self.steps += 1
        self.drafted_steps += step.drafted > 0
        self.draft_nodes += step.drafted
        self.accepted[step.verdict.accepted] += 1
        self.sources.update(step.sources[:kept])
        for part in self.parts:
            self.parts[part] += getattr(step.timings, part)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step, the target's own next token included; 1 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens on the accepted paths, those that the end of the text cut off included."""
        return sum(count * steps for count, steps in self.accepted.items())

    @property
    def acceptance_rate(self) -> float:
        """vLLM's: accepted draft tokens over draft nodes. Low for a tree, whose siblings exclude each other."""
        return self.accepted_tokens / self.draft_nodes if self.draft_nodes else 0.0

    @property
    def draft_nodes_per_step(self) -> float:
        """Draft nodes over steps, those without a draft included."""
        return self.draft_nodes / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over seconds, prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prompt was read: every new token was emitted in them."""
        return max(0.0, self.seconds - self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens over ``decode_seconds``; 0 if none was decoded."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens over the seconds that reading them took; 0 for a prompt of one token, which a step reads."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    def acceptance_by_depth(self) -> list[float]:
        """Share of the steps with a draft that accepted at least 1, 2, ... draft tokens."""
        deepest = max(self.accepted, default=0)
        total = max(1, self.drafted_steps)
        return [sum(n for a, n in self.accepted.items() if a >= d) / total for d in range(1, deepest + 1)]

    def to_dict(self) -> dict[str, Any]:
        """For --json and result files."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 3),
            "prompt_tokens_per_second": round(self.prompt_tokens_per_second, 3),
            "prefill_tokens": self.prefill_tokens,
            "seconds": round(self.seconds, 6),
            "prefill_seconds": round(self.prefill_seconds, 6),
            "drafted_steps": self.drafted_steps,
            "draft_nodes": self.draft_nodes,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted": {str(count): steps for count, steps in sorted(self.accepted.items())},
            "acceptance_by_depth": [round(x, 4) for x in self.acceptance_by_depth()],
            "sources": dict(self.sources),
            "seconds_by_part": {part: round(value, 6) for part, value in self.parts.items()},
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Stats:
        """What ``to_dict`` wrote."""
        return Stats(
            tokens=record["tokens"],
            steps=record["steps"],
            drafted_steps=record["drafted_steps"],
            draft_nodes=record["draft_nodes"],
            prefill_tokens=record.get("prefill_tokens", 0),
            seconds=record["seconds"],
            prefill_seconds=record["prefill_seconds"],
            accepted=Counter({int(count): steps for count, steps in record["accepted"].items()}),
            sources=Counter(record["sources"]),
            parts=dict(record["seconds_by_part"]),
        )
