"""The options that change scores by the tokens so far. Each equals the logits processor of transformers of that name.

``ScoreOptions`` holds them as a caller or a model's generation config gives them, and makes the processors of a prompt:
functions (tokens so far, logits [V]) -> logits [V], in the order in which transformers applies them.

Legend: V vocabulary, L tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import InputError
from anabranch.sampling import LogitsProcessor, penalised

__all__ = ["ScoreOptions", "ids_of"]

_Ids = tuple[int, ...]
_Biases = tuple[tuple[_Ids, float], ...]


@dataclass(frozen=True)
class ScoreOptions:
    """Options of a call that change scores by the tokens so far; None is the model's default, or off.

    repetition_penalty                divide positive and multiply negative logits of tokens seen before; 1: off
    no_repeat_ngram_size              no n-gram of this length occurs twice, the prompt included; 0: off
    sequence_bias                     {token ids: bias} or [[token ids, bias], ...], added to the logit of the last id
                                      where the others precede it
    logit_bias                        {token id: bias}, added to the logit of each id
    bad_words_ids                     lists of token ids that do not occur
    suppress_tokens                   token ids that do not occur
    begin_suppress_tokens             token ids that are not the first new token
    min_new_tokens                    no end token before this many new tokens
    min_length                        the same, with the prompt's tokens counted; ``min_new_tokens`` overrides it
    forced_bos_token_id               the token after a prompt of one token
    forced_eos_token_id               the token, or one of several, at the last place that ``max_new_tokens`` leaves
    exponential_decay_length_penalty  (start, factor): raises end tokens' logits after ``start`` new tokens
    encoder_repetition_penalty        above 1 raises the logits of the prompt's tokens; 1: off
    encoder_no_repeat_ngram_size      no n-gram of the prompt of this length is repeated; 0: off
    remove_invalid_values             replace logits that are not finite

    Raises InputError for a value that is out of range or of the wrong type.
    """

    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    sequence_bias: Mapping[_Ids, float] | Sequence[Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    exponential_decay_length_penalty: Sequence[float] | None = None
    encoder_repetition_penalty: float | None = None
    encoder_no_repeat_ngram_size: int | None = None
    remove_invalid_values: bool | None = None

    def __post_init__(self) -> None:
        for name in ("repetition_penalty", "encoder_repetition_penalty"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise InputError(f"{name} must be a positive number (1 is off), got {value!r}")
        for name in ("no_repeat_ngram_size", "min_new_tokens", "min_length", "encoder_no_repeat_ngram_size"):
            value = getattr(self, name)
            if value is not None and not (_is_id(value)):
                raise InputError(f"{name} must be a whole number of at least 0 (off), got {value!r}")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            ids_of(getattr(self, name), name)
        ids_of(self.forced_eos_token_id, "forced_eos_token_id")
        if self.forced_bos_token_id is not None and not _is_id(self.forced_bos_token_id):
            raise InputError(f"forced_bos_token_id must be a token id, got {self.forced_bos_token_id!r}")
        _words(self.bad_words_ids)
        _biases(self.sequence_bias)
        _logit_biases(self.logit_bias)
        _decay(self.exponential_decay_length_penalty)
        if not isinstance(self.remove_invalid_values, bool | None):
            raise InputError(f"remove_invalid_values must be True or False, got {self.remove_invalid_values!r}")

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(ScoreOptions)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def first_penalty(self) -> float:
        """The repetition penalty if nothing changes scores before it, else 1: then ``score_processors`` apply it.

        As a parameter of ``SamplingParams``, drafters follow it too.
        """
        before = self.sequence_bias or self.logit_bias or (self.encoder_repetition_penalty or 1) != 1
        return 1.0 if before else float(self.repetition_penalty or 1.0)

    def score_processors(
        self, prompt_ids: Sequence[int], ends: Iterable[int], max_length: int, vocabulary: int
    ) -> tuple[LogitsProcessor, ...]:
        """The processors of a prompt's logits after ``first_penalty``, in the order of transformers.

        ends        the token ids that end the text
        max_length  tokens of the prompt and of the longest text after it

        Raises InputError for a token id that is not in the vocabulary.
        """
        prompt, end_ids = tuple(int(token) for token in prompt_ids), tuple(sorted(ends))
        self._check_ids(vocabulary)
        found: list[LogitsProcessor] = []
        if biases := _biases(self.sequence_bias):
            found.append(_SequenceBias(biases))
        if biases := _logit_biases(self.logit_bias):
            found.append(_SequenceBias(biases))
        if (reward := self.encoder_repetition_penalty or 1) != 1:
            found.append(_PromptPenalty(prompt, 1 / reward))
        if (penalty := self.repetition_penalty or 1) != 1 and self.first_penalty == 1:
            found.append(_RepetitionPenalty(penalty))
        if size := int(self.no_repeat_ngram_size or 0):
            found.append(_NoRepeatNGram(size))
        if size := int(self.encoder_no_repeat_ngram_size or 0):
            found.append(_NoPromptNGram(size, prompt))
        if words := tuple(word for word in _words(self.bad_words_ids) if word not in {(end,) for end in end_ids}):
            found.append(_SequenceBias(tuple((word, -math.inf) for word in words)))
        least = len(prompt) + int(self.min_new_tokens) if self.min_new_tokens is not None else int(self.min_length or 0)
        if end_ids and least > len(prompt):
            found.append(_Forbid(end_ids, 0, least))
        return (*found, *self._of_places(prompt, end_ids, max_length))

    def _of_places(self, prompt: _Ids, end_ids: _Ids, max_length: int) -> Iterable[LogitsProcessor]:
        """The processors that come last, most of which change a single place of the text."""
        if self.forced_bos_token_id is not None:
            yield _Force((int(self.forced_bos_token_id),), 1)
        if forced := ids_of(self.forced_eos_token_id, "forced_eos_token_id"):
            yield _Force(forced, max_length - 1)
        if self.remove_invalid_values:
            yield _remove_invalid
        if end_ids and (decay := _decay(self.exponential_decay_length_penalty)) is not None:
            yield _LengthDecay(end_ids, decay[0] + len(prompt), decay[1])
        if suppressed := ids_of(self.suppress_tokens, "suppress_tokens"):
            yield _Forbid(suppressed, 0, None)
        if suppressed := ids_of(self.begin_suppress_tokens, "begin_suppress_tokens"):
            begin = len(prompt) + (len(prompt) <= 1 and self.forced_bos_token_id is not None)
            yield _Forbid(suppressed, begin, begin + 1)

    def _check_ids(self, vocabulary: int) -> None:
        bos = () if self.forced_bos_token_id is None else (int(self.forced_bos_token_id),)
        named = {
            "sequence_bias": [token for ids, _ in _biases(self.sequence_bias) for token in ids],
            "logit_bias": [ids[0] for ids, _ in _logit_biases(self.logit_bias)],
            "bad_words_ids": [token for word in _words(self.bad_words_ids) for token in word],
            "suppress_tokens": ids_of(self.suppress_tokens, "suppress_tokens"),
            "begin_suppress_tokens": ids_of(self.begin_suppress_tokens, "begin_suppress_tokens"),
            "forced_bos_token_id": bos,
            "forced_eos_token_id": ids_of(self.forced_eos_token_id, "forced_eos_token_id"),
        }
        for name, tokens in named.items():
            if wrong := [token for token in tokens if token >= vocabulary]:
                raise InputError(f"{name} has the token id {wrong[0]}, but the vocabulary ends at {vocabulary - 1}")


# -- what values are accepted ------------------------------------------------------------------------
def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def ids_of(value: Any, name: str) -> _Ids:
    """Token ids given as one id, as several, or as None. Raises InputError for anything else."""
    if value is None:
        return ()
    if _is_id(value):
        return (int(value),)
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise InputError(f"{name} must be a list of token ids, got {value!r}")
    tokens = tuple(value)
    if wrong := [token for token in tokens if not _is_id(token)]:
        raise InputError(f"{name} must be a list of token ids, got {wrong[0]!r} in it")
    return tuple(map(int, tokens))


def _words(value: Any) -> tuple[_Ids, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"bad_words_ids must be a list of lists of token ids, got {value!r}")
    words = tuple(ids_of(word, "an item of bad_words_ids") for word in value)
    if () in words:
        raise InputError("bad_words_ids has an empty list; leave it out")
    return words


def _biases(value: Any) -> _Biases:
    wrong = "sequence_bias must be {(token ids): bias} or [[[token ids], bias], ...]"
    if value is None:
        return ()
    if not isinstance(value, Mapping | Sequence) or isinstance(value, str):
        raise InputError(f"{wrong}, got {value!r}")
    found: dict[_Ids, float] = {}
    for item in value.items() if isinstance(value, Mapping) else value:
        if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 2:
            raise InputError(f"{wrong}, got {item!r} in it")
        ids, bias = ids_of(item[0], "sequence_bias"), item[1]
        if not ids or not _is_number(bias) or math.isnan(bias):
            raise InputError(f"{wrong}, got {item!r} in it")
        found[ids] = float(bias)
    return tuple(found.items())


def _logit_biases(value: Any) -> _Biases:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias must be {{token id: bias}}, got {value!r}")
    for token, bias in value.items():
        if not _is_id(token) or not _is_number(bias) or math.isnan(bias):
            raise InputError(f"logit_bias must be {{token id: bias}}, got {token!r}: {bias!r} in it")
    return tuple(((int(token),), float(bias)) for token, bias in value.items())


def _decay(value: Any) -> tuple[int, float] | None:
    if value is None or (isinstance(value, Sequence) and not value):
        return None
    if not isinstance(value, Sequence) or len(value) != 2 or not _is_id(value[0]) or not _is_number(value[1]):
        raise InputError(f"exponential_decay_length_penalty must be (start, factor), or () for off, got {value!r}")
    return int(value[0]), float(value[1])


# -- the processors ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _RepetitionPenalty:
    penalty: float

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        return penalised(logits_V, tokens, self.penalty)


@dataclass(frozen=True)
class _PromptPenalty:
    prompt: _Ids
    penalty: float

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        return penalised(logits_V, self.prompt, self.penalty)


@dataclass(frozen=True)
class _SequenceBias:
    """Biases are summed before they are added, as in transformers, so that roundings agree."""

    biases: _Biases

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
    prompt: _Ids

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

    ids: _Ids
    first: int
    last: int | None

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        inside = self.first <= len(tokens) and (self.last is None or len(tokens) < self.last)
        return _forbidden(logits_V, self.ids) if inside else logits_V


@dataclass(frozen=True)
class _Force:
    """Allow no other token ids than these after exactly ``length`` tokens."""

    ids: _Ids
    length: int

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        if len(tokens) != self.length:
            return logits_V
        forced_V = torch.full_like(logits_V, -math.inf)
        forced_V[list(self.ids)] = 0.0
        return forced_V


@dataclass(frozen=True)
class _LengthDecay:
    ids: _Ids
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
