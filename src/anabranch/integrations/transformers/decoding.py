"""Decode the rows of a ``generate`` call and put them together as transformers would, one position at a time.

Speculation gives each row several tokens a step, and not all rows the same number. Stopping criteria, streamers and
padding are defined on batches that grow by one token in every row, so rows wait for each other here: position t is
handed out when every row that is not finished has its token t.

B rows of the batch, L tokens of the longest prompt, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.stats import Stats
from anabranch.errors import InputError
from anabranch.integrations.transformers.processors import RowProcessors
from anabranch.methods import Drafter

__all__ = ["Decoded", "decode"]


@dataclass
class Decoded:
    """The result: sequences [B, L + T], and for each new position logits before and after the processors [B, V]."""

    sequences: Tensor
    raw: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    stats: tuple[Stats, ...]


@dataclass
class _Row:
    """A row while it decodes; ``logits`` of each token (raw, processed) where they are recorded."""

    ticket: Ticket
    processors: RowProcessors | None
    tokens: list[int] = field(default_factory=list)
    logits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


def decode(
    scheduler: Scheduler,
    drafter: Drafter,
    requests: Sequence[Request],
    processors: Sequence[RowProcessors | None],
    input_ids: Tensor,
    *,
    criteria: Any,
    pad: int | None,
    streamer: Any = None,
    recording: bool = False,
) -> Decoded:
    """Decode all requests; a row ends where ``criteria`` say so, and is padded with ``pad`` until the others end.

    pad        None: rows that ended go on until all have, as transformers does without an end token
    streamer   gets the tokens [B] of each position
    recording  whether to return logits; ``processors`` must record them

    Raises what decoding raises, after all rows were cancelled.
    """
    for request in requests:
        scheduler.check(request, drafter)
    rows: list[_Row] = []
    try:
        for request, run in zip(requests, processors, strict=True):
            rows.append(_Row(scheduler.submit(request, drafter), run))
        return _together(scheduler, rows, input_ids, criteria, pad, streamer, recording)
    finally:
        for row in rows:
            scheduler.cancel(row.ticket)
        scheduler.settle()


def _together(
    scheduler: Scheduler, rows: list[_Row], ids: Tensor, criteria: Any, pad: int | None, streamer: Any, recording: bool
) -> Decoded:
    going, raw, scores, t = torch.ones(len(rows), dtype=torch.bool, device=ids.device), [], [], 0
    ended = [False] * len(rows)
    while not all(ended):
        needed = [row for row, over in zip(rows, ended, strict=True) if pad is None or not over]
        for row in needed:
            _fill(scheduler, row, t + 1, recording)
        chosen = [row.tokens[t] if row in needed else pad for row in rows]
        token_B = torch.tensor(chosen, dtype=ids.dtype, device=ids.device)
        if recording:
            before, after = _logits(rows, needed, t, pad)
            raw.append(before)
            scores.append(after)
        ids = torch.cat((ids, token_B[:, None]), dim=-1)
        going = going & ~criteria(ids, tuple(scores) if recording else None).to(ids.device)
        ended, t = (~going).tolist(), t + 1
        for row, over in zip(rows, ended, strict=True):
            if over and pad is not None:
                scheduler.cancel(row.ticket)
        if streamer is not None:
            streamer.put(token_B.cpu())
    if streamer is not None:
        streamer.end()
    return Decoded(ids, tuple(raw), tuple(scores), tuple(row.stats for row in rows))


def _fill(scheduler: Scheduler, row: _Row, count: int, recording: bool) -> None:
    """Decode until a row has ``count`` tokens. Raises InputError where it ends before: at the context length."""
    while len(row.tokens) < count:
        if not scheduler.advance(row.ticket):
            raise InputError(
                "the stopping criteria let a text go on past its maximum length; pass a max_new_tokens that reaches "
                "as far as they do"
            )
        for step in scheduler.ready(row.ticket):
            if recording:
                assert row.processors is not None
                row.logits += row.processors.taken(row.tokens, step.tokens)
            row.tokens += step.tokens
            row.stats.add(step)
    row.stats.seconds, row.stats.prefill_seconds = row.ticket.seconds, row.ticket.prefill_seconds


def _logits(rows: Sequence[_Row], needed: Sequence[_Row], t: int, pad: int | None) -> tuple[Tensor, Tensor]:
    """Raw and processed logits [B, V] of position t; a row that has ended is certain of its padding."""
    pairs = [row.logits[t] if row in needed else None for row in rows]
    some = next(pair for pair in pairs if pair is not None)[0]
    padding = torch.full_like(some, -torch.inf)
    if pad is not None:
        padding[pad] = 0.0
    before, after = ([padding if pair is None else pair[which] for pair in pairs] for which in (0, 1))
    return torch.stack(before), torch.stack(after)
