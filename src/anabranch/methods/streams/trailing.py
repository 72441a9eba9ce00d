"""Streams that trail the newest token of each row, on the native kernels.

M main rows of a pass, S streams, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.drafting.drafter import Row, tally
from anabranch.methods.streams.native import NativeTrail
from anabranch.model.cache import Cache

__all__ = ["Trailed", "lengths_with", "trailing"]


@dataclass(eq=False)
class Trailed:
    """The committed rows that streams trail.

    row      the row
    slot     its place in the cache
    latest   the newest token of its text, or of the draft after it
    main_MD  main rows before the streams' first layer; ``node`` is the one of the token before that
    tokens   drafted after its text; all but the last one are in the cache
    """

    row: Row
    slot: int
    latest: int
    main_MD: Tensor
    node: int
    tokens: list[int] = field(default_factory=list)


def trailing(trail: NativeTrail, rows: Sequence[Trailed], cache: Cache, streams: int) -> list[Tensor]:
    """The states [S, D] of streams that trail the latest token of rows, whose slots ascend."""
    nodes, emitted, counts = ([0] * cache.count for _ in range(3))
    main_MD, together = rows[0].main_MD, all(row.main_MD is rows[0].main_MD for row in rows)
    if not together:
        main_MD = torch.stack([row.main_MD[row.node] for row in rows])
    for i, row in enumerate(rows):
        nodes[row.slot], emitted[row.slot] = row.node if together else i, row.latest
        counts[row.slot] = streams
    tally(trail.call, [row.row for row in rows])
    states = trail.run(main_MD, nodes, emitted, counts, cache, lengths=lengths_with(rows, cache))
    return [states] if len(rows) == 1 else list(states.view(len(rows), streams, -1))


def lengths_with(rows: Sequence[Trailed], cache: Cache) -> list[int]:
    """The tokens that each row of the cache has, with those that were drafted."""
    lengths = list(cache.lengths)
    for row in rows:
        lengths[row.slot] += len(row.tokens)
    return lengths
