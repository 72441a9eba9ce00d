"""Logits processors of the options that change scores by the tokens so far (``declared.ScoreKeywords``).

Each equals the logits processor of transformers of that name: a function (tokens so far, logits [V]) -> logits [V].

Legend: V vocabulary, L tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.declared import Biases, Ids, LogitsProcessor, ScoreKeywords, biases, decay, ids_of, logit_biases, words
from anabranch.errors import InputError
from anabranch.sampling import penalised

__all__ = ["first_penalty", "score_processors"]


def first_penalty(options: ScoreKeywords) -> float:
    """The repetition penalty if nothing changes scores before it, else 1: then ``score_processors`` apply it.

    As a parameter of ``SamplingParams``, drafters follow it too.
    """
    before = (
        options.get("sequence_bias")
        or options.get("logit_bias")
        or (options.get("encoder_repetition_penalty") or 1) != 1
    )
    return 1.0 if before else float(options.get("repetition_penalty") or 1.0)


def score_processors(
    options: ScoreKeywords, prompt_ids: Sequence[int], ends: Iterable[int], max_length: int, vocabulary: int
) -> tuple[LogitsProcessor, ...]:
    """The processors of a prompt's logits after ``first_penalty``, in the order of transformers.

    ends        the token ids that end the text
    max_length  tokens of the prompt and of the longest text after it

    Raises InputError for a token id that is not in the vocabulary.
    """
    prompt, end_ids = tuple(int(token) for token in prompt_ids), tuple(sorted(ends))
    _check_ids(options, vocabulary)
    made: list[LogitsProcessor] = []
    if added := biases("sequence_bias", options.get("sequence_bias")):
        made.append(_SequenceBias(added))
    if added := logit_biases("logit_bias", options.get("logit_bias")):
        made.append(_SequenceBias(added))
    if (reward := options.get("encoder_repetition_penalty") or 1) != 1:
        made.append(_PromptPenalty(prompt, 1 / reward))
    if (penalty := options.get("repetition_penalty") or 1) != 1 and first_penalty(options) == 1:
        made.append(_RepetitionPenalty(penalty))
    if size := int(options.get("no_repeat_ngram_size") or 0):
        made.append(_NoRepeatNGram(size))
    if size := int(options.get("encoder_no_repeat_ngram_size") or 0):
        made.append(_NoPromptNGram(size, prompt))
    bad = words("bad_words_ids", options.get("bad_words_ids"))
    if bad := tuple(word for word in bad if word not in {(end,) for end in end_ids}):
        made.append(_SequenceBias(tuple((word, -math.inf) for word in bad)))
    new = options.get("min_new_tokens")
    least = len(prompt) + int(new) if new is not None else int(options.get("min_length") or 0)
    if end_ids and least > len(prompt):
        made.append(_Forbid(end_ids, 0, least))
    return (*made, *_of_places(options, prompt, end_ids, max_length))


def _of_places(options: ScoreKeywords, prompt: Ids, end_ids: Ids, max_length: int) -> Iterable[LogitsProcessor]:
    """The processors that come last, most of which change a single place of the text."""
    if (bos := options.get("forced_bos_token_id")) is not None:
        yield _Force((int(bos),), 1)
    if forced := ids_of("forced_eos_token_id", options.get("forced_eos_token_id")):
        yield _Force(forced, max_length - 1)
    if options.get("remove_invalid_values"):
        yield _remove_invalid
    penalty = decay("exponential_decay_length_penalty", options.get("exponential_decay_length_penalty"))
    if end_ids and penalty is not None:
        yield _LengthDecay(end_ids, penalty[0] + len(prompt), penalty[1])
    if suppressed := ids_of("suppress_tokens", options.get("suppress_tokens")):
        yield _Forbid(suppressed, 0, None)
    if suppressed := ids_of("begin_suppress_tokens", options.get("begin_suppress_tokens")):
        begin = len(prompt) + (len(prompt) <= 1 and bos is not None)
        yield _Forbid(suppressed, begin, begin + 1)


def _check_ids(options: ScoreKeywords, vocabulary: int) -> None:
    lists = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
    named = {
        "sequence_bias": [id for ids, _ in biases("sequence_bias", options.get("sequence_bias")) for id in ids],
        "logit_bias": [ids[0] for ids, _ in logit_biases("logit_bias", options.get("logit_bias"))],
        "bad_words_ids": [id for word in words("bad_words_ids", options.get("bad_words_ids")) for id in word],
        **{name: [*ids_of(name, options.get(name))] for name in lists},
    }
    for name, tokens in named.items():
        if wrong := [token for token in tokens if token >= vocabulary]:
            raise InputError(f"{name} has the token id {wrong[0]}, but the vocabulary ends at {vocabulary - 1}")


# -- the processors ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _RepetitionPenalty:
    penalty: float

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        return penalised(logits_V, tokens, self.penalty)


@dataclass(frozen=True)
class _PromptPenalty:
    prompt: Ids
    penalty: float

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        return penalised(logits_V, self.prompt, self.penalty)


@dataclass(frozen=True)
class _SequenceBias:
    """Biases are summed before they are added, as in transformers, so that roundings agree."""

    biases: Biases

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        matching = [(ids[-1], bias) for ids, bias in self.biases if len(ids) == 1]
        for ids, bias in self.biases:
            before = len(ids) - 1
            if before and before <= len(tokens) and tuple(tokens[len(tokens) - before :]) == ids[:-1]:
                matching.append((ids[-1], bias))
        if not matching:
            return logits_V
        where = torch.tensor([token for token, _ in matching], device=logits_V.device)
        values = torch.tensor([bias for _, bias in matching], dtype=logits_V.dtype, device=logits_V.device)
        return logits_V + torch.zeros_like(logits_V).index_add_(0, where, values)


@dataclass(frozen=True)
class _NoRepeatNGram:
    size: int

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        return _without_repeats(logits_V, tokens, tokens, self.size)


@dataclass(frozen=True)
class _NoPromptNGram:
    size: int
    prompt: Ids

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        return _without_repeats(logits_V, tokens, self.prompt, self.size)


def _without_repeats(logits_V: Tensor, tokens: Sequence[int], text: Sequence[int], size: int) -> Tensor:
    """Forbid the tokens that follow the last ``size`` - 1 tokens where these occur in ``text``."""
    if len(text) < size or len(tokens) < size - 1:
        return logits_V
    windows_LS = np.lib.stride_tricks.sliding_window_view(np.asarray(text, np.int64), size)
    suffix_S = np.asarray(tokens[len(tokens) - size + 1 :] if size > 1 else (), np.int64)
    repeated = windows_LS[(windows_LS[:, :-1] == suffix_S).all(axis=1), -1]
    return _forbidden(logits_V, repeated.tolist())


@dataclass(frozen=True)
class _Forbid:
    """Forbid token ids while there are at least ``first`` and fewer than ``last`` tokens; None: until the end."""

    ids: Ids
    first: int
    last: int | None

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        inside = self.first <= len(tokens) and (self.last is None or len(tokens) < self.last)
        return _forbidden(logits_V, self.ids) if inside else logits_V


@dataclass(frozen=True)
class _Force:
    """Allow no other token ids than these after exactly ``length`` tokens."""

    ids: Ids
    length: int

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        if len(tokens) != self.length:
            return logits_V
        forced_V = torch.full_like(logits_V, -math.inf)
        forced_V[list(self.ids)] = 0.0
        return forced_V


@dataclass(frozen=True)
class _LengthDecay:
    ids: Ids
    start: int
    factor: float

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        beyond = len(tokens) - self.start
        if beyond <= 0:
            return logits_V
        where = torch.tensor(self.ids, device=logits_V.device)
        scores = logits_V[where]
        rise = (scores.abs() * (pow(self.factor, beyond) - 1)).masked_fill(~scores.isfinite(), 0.0)
        return logits_V.index_put((where,), scores + rise)


def _remove_invalid(tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    limits = torch.finfo(logits_V.dtype)
    return logits_V.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


def _forbidden(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    if not ids:
        return logits_V
    return logits_V.index_fill(0, torch.tensor(ids, device=logits_V.device), -math.inf)
