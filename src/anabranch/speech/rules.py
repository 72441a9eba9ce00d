"""Logits processors of Whisper: the grammar of timestamps, and the log probabilities of the tokens that were chosen.

They are processors as those of ``anabranch.processors``, so that plain decoding and drafts follow them alike.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from anabranch.declared import LogitsProcessor
from anabranch.speech.vocabulary import Vocabulary

__all__ = ["Confidence", "timestamp_rules"]

LATEST = 50  # timestamps after 0.00 that a window may begin with: 1 s, as in OpenAI's Whisper


def timestamp_rules(vocabulary: Vocabulary, begin: int) -> LogitsProcessor:
    """OpenAI's ``ApplyTimestampRules`` for a text that begins after ``begin`` tokens.

    Timestamps come in pairs, except before the end, and never decrease; the first token is one of at most 1 s; and
    where all timestamps together are more probable than any other token, the next token is a timestamp.
    """
    return partial(_apply, vocabulary, begin)


def _apply(vocabulary: Vocabulary, begin: int, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    first, text = vocabulary.first_timestamp, tokens[begin:]
    logits_V[vocabulary.no_timestamps] = -math.inf
    if not text:
        logits_V[:first] = -math.inf
        logits_V[first + LATEST + 1 :] = -math.inf
        return logits_V
    paired = len(text) < 2 or text[-2] >= first
    if text[-1] >= first:
        if paired:  # text follows
            logits_V[first:] = -math.inf
        else:  # the second of a pair follows, or the end
            logits_V[: vocabulary.end] = -math.inf
    last = next((token for token in reversed(text) if token >= first), None)
    if last is not None:
        open_pair = text[-1] >= first and not paired
        logits_V[first : last if open_pair else last + 1] = -math.inf
    if torch.logsumexp(logits_V[first:], 0) > logits_V[:first].max():
        logits_V[:first] = -math.inf
    return logits_V


class Confidence:
    """A processor that changes nothing and records the log probability of each token that follows.

    As the last one it sees what temperature divides, which is where OpenAI's Whisper takes log probabilities. Decoding
    asks for each place of a text once, in order (``verify.follow``).
    """

    def __init__(self) -> None:
        self._values: dict[int, float] = {}  # by place of the token
        self._last: tuple[int, Tensor] | None = None

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        """Record the last token of ``tokens``, and keep the logits [V] of the next."""
        self._settle(tokens)
        self._last = len(tokens), logits_V
        return logits_V

    def _settle(self, tokens: Sequence[int]) -> None:
        if self._last is not None and self._last[0] < len(tokens):
            place, logits_V = self._last
            self._values[place] = float(logits_V[tokens[place]] - logits_V.logsumexp(0))

    def total(self, prompt: Sequence[int], new: Sequence[int]) -> float:
        """The log probability of the tokens ``new`` after ``prompt``."""
        self._settle([*prompt, *new])
        return math.fsum(self._values.get(len(prompt) + place, 0.0) for place in range(len(new)))
