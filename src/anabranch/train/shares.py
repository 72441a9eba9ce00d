"""Split a step's batch between processes: parts of its rows, and their segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anabranch.learning.examples import Batch
from anabranch.learning.objective import Segment
from anabranch.train.processes import Processes

__all__ = ["Share", "shares"]

Segments = Callable[[Batch], Iterator[Segment]]


@dataclass(frozen=True)
class Share:
    """A part of a batch.

    counted  False: the rows are another process's, and are computed without effect, to call the same layers
    least    the number of segments to compute; if the part has fewer, the last one is repeated without effect
    """

    batch: Batch
    counted: bool = True
    least: int = 0

    def weighted(self, segments: Segments) -> Iterator[tuple[Segment, float]]:
        """The segments to compute, each with the weight of its loss: 1, or 0 for those without effect."""
        done, last = 0, None
        for last in segments(self.batch):
            done += 1
            yield last, float(self.counted)
        for _ in range(self.least - done if last is not None else 0):
            assert last is not None
            yield last, 0.0


def shares(batch: Batch, segments: Segments, processes: Processes, accumulate: int) -> list[Share]:
    """The shares of this process, one after another: ``accumulate`` of them, or fewer for a small batch.

    If the target is sharded, every call of a layer gathers its weights from all processes. Then all processes compute
    as many shares and segments, those without effect included.
    """
    parts = batch.split(processes.count * accumulate)
    if not processes.sharded:
        return [Share(part) for part in parts[processes.rank :: processes.count]]
    made = []
    for first in range(0, len(parts), processes.count):
        together = parts[first : first + processes.count]
        counts = [sum(1 for _ in segments(part)) for part in together]
        most = max(counts)
        longest = together[counts.index(most)]
        mine = processes.rank < len(together) and counts[processes.rank] > 0
        made.append(Share(together[processes.rank] if mine else longest, mine, most))
    return made
