"""Jobs, which the event loop hands to the decoding thread, and the events that come back."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from anabranch.decoding.engine import Request
from anabranch.decoding.generation import Chunk, Output
from anabranch.decoding.scheduler import Ticket
from anabranch.decoding.scoring import Score
from anabranch.drafting.drafter import Drafter

__all__ = ["Event", "Job", "ScoreJob"]


@dataclass(eq=False)
class Job:
    """One sequence to decode, and its progress. Times are those of ``time.monotonic``.

    arrived   when its request came
    priority  higher ones come first
    joined   when it was given a row
    first    when its first token came, and ``last`` its last one
    reason   why it ended: a finish reason, "abort" or "error"; None: it has not
    """

    request: Request
    drafter: Drafter
    stop: tuple[str, ...]
    arrived: float
    priority: int = 0
    whole: bool = False
    ticket: Ticket | None = None
    output: Output | None = None
    joined: float | None = None
    first: float | None = None
    last: float | None = None
    reason: str | None = None

    @property
    def tokens(self) -> int:
        """New tokens so far."""
        return 0 if self.output is None else len(self.output.tokens)


@dataclass(eq=False)
class ScoreJob:
    """A text whose log probabilities are wanted, and those of the ``top`` most probable tokens at each place."""

    tokens: list[int]
    lora: str | None
    top: int
    passes: Generator[None, None, Score] | None = None


@dataclass(frozen=True)
class Event:
    """A product of one part of an answer: a chunk, a score, or the error that ended it."""

    part: int
    chunk: Chunk | None = None
    score: Score | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        """Return whether its part has ended."""
        return self.chunk is None or self.chunk.result is not None
