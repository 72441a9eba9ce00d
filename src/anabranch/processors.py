"""Logits processors of the options that change scores by the tokens so far (``declared.ScoreKeywords``).

Each equals the logits processor of transformers of that name: a function (tokens so far, logits [V]) -> logits [V],
which may write into its argument, a copy (``sampling.process_logits``).

Legend: V vocabulary, L tokens so far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

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
    options: ScoreKeywords,
    prompt_ids: Sequence[int],
    ends: Iterable[int],
    max_length: int,
    vocabulary: int,
    source: Sequence[int] | None = None,
) -> tuple[LogitsProcessor, ...]:
    """The processors of a prompt's logits after ``first_penalty``, in the order of transformers.

    ends        the token ids that end the text
    max_length  tokens of the prompt and of the longest text after it
    source      the text that options named after an encoder look at; None: the prompt

    Raises InputError for a token id that is not in the vocabulary.
    """
    prompt, end_ids = tuple(int(token) for token in prompt_ids), tuple(sorted(ends))
    encoded = prompt if source is None else tuple(source)
    _check_ids(options, vocabulary)
    made: list[LogitsProcessor] = []
    if added := biases("sequence_bias", options.get("sequence_bias")):
        made.append(partial(_bias, added))
    if added := logit_biases("logit_bias", options.get("logit_bias")):
        made.append(partial(_bias, added))
    if (reward := options.get("encoder_repetition_penalty") or 1) != 1:
        made.append(partial(_penalise, encoded, 1 / reward))
    if (penalty := options.get("repetition_penalty") or 1) != 1 and first_penalty(options) == 1:
        made.append(partial(_penalise, None, penalty))
    presence, frequency = options.get("presence_penalty") or 0.0, options.get("frequency_penalty") or 0.0
    if presence or frequency:
        made.append(partial(_penalise_counts, len(prompt), presence, frequency))
    if size := int(options.get("no_repeat_ngram_size") or 0):
        made.append(partial(_forbid_repeats, size, None))
    if size := int(options.get("encoder_no_repeat_ngram_size") or 0):
        made.append(partial(_forbid_repeats, size, encoded))
    bad = words("bad_words_ids", options.get("bad_words_ids"))
    if bad := tuple(word for word in bad if word not in {(end,) for end in end_ids}):
        made.append(partial(_bias, tuple((word, -math.inf) for word in bad)))
    new = options.get("min_new_tokens")
    least = len(prompt) + int(new) if new is not None else int(options.get("min_length") or 0)
    if end_ids and least > len(prompt):
        made.append(partial(_forbid, end_ids, 0, least))
    return (*made, *_of_places(options, prompt, end_ids, max_length))


def _of_places(options: ScoreKeywords, prompt: Ids, end_ids: Ids, max_length: int) -> Iterable[LogitsProcessor]:
    """The processors that come last, most of which change a single place of the text."""
    if (bos := options.get("forced_bos_token_id")) is not None:
        yield partial(_force, (int(bos),), 1)
    if forced := ids_of("forced_eos_token_id", options.get("forced_eos_token_id")):
        yield partial(_force, forced, max_length - 1)
    if options.get("remove_invalid_values"):
        yield _remove_invalid
    penalty = decay("exponential_decay_length_penalty", options.get("exponential_decay_length_penalty"))
    if end_ids and penalty is not None:
        yield partial(_raise_ends, end_ids, penalty[0] + len(prompt), penalty[1])
    if suppressed := ids_of("suppress_tokens", options.get("suppress_tokens")):
        yield partial(_forbid, suppressed, 0, math.inf)
    if suppressed := ids_of("begin_suppress_tokens", options.get("begin_suppress_tokens")):
        begin = len(prompt) + (len(prompt) <= 1 and bos is not None)
        yield partial(_forbid, suppressed, begin, begin + 1)


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


# -- the processors: partial functions of (tokens so far, logits [V]) --------------------------------------
def _penalise(text: Ids | None, penalty: float, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Penalise the tokens of a text; None: the tokens so far."""
    return penalised(logits_V, tokens if text is None else text, penalty)


def _penalise_counts(start: int, presence: float, frequency: float, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Lower the logits of the tokens from ``start`` on, once and for each time that they occur, as in OpenAI's API."""
    counts = Counter(tokens[start:])
    if not counts:
        return logits_V
    where = torch.tensor([*counts], device=logits_V.device)
    amounts = [presence + frequency * count for count in counts.values()]
    return logits_V.index_add(0, where, torch.tensor(amounts, dtype=logits_V.dtype, device=logits_V.device), alpha=-1)


def _bias(added: Biases, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Biases are summed before they are added, as in transformers, so that roundings agree."""
    matching = [(ids[-1], bias) for ids, bias in added if len(ids) == 1]
    for ids, bias in added:
        before = len(ids) - 1
        if before and before <= len(tokens) and tuple(tokens[len(tokens) - before :]) == ids[:-1]:
            matching.append((ids[-1], bias))
    if not matching:
        return logits_V
    where = torch.tensor([token for token, _ in matching], device=logits_V.device)
    values = torch.tensor([bias for _, bias in matching], dtype=logits_V.dtype, device=logits_V.device)
    return logits_V + torch.zeros_like(logits_V).index_add_(0, where, values)


def _forbid_repeats(size: int, text: Ids | None, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Forbid the tokens that follow the last ``size`` - 1 tokens where these occur in a text; None: in the tokens."""
    text = tuple(tokens) if text is None else text
    if len(text) < size or len(tokens) < size - 1:
        return logits_V
    windows_LS = np.lib.stride_tricks.sliding_window_view(np.asarray(text, np.int64), size)
    suffix_S = np.asarray(tokens[len(tokens) - size + 1 :] if size > 1 else (), np.int64)
    repeated = windows_LS[(windows_LS[:, :-1] == suffix_S).all(axis=1), -1]
    return _without(logits_V, repeated.tolist())


def _forbid(ids: Ids, first: int, last: float, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Forbid token ids while there are at least ``first`` and fewer than ``last`` tokens, in place."""
    if first <= len(tokens) < last:
        logits_V.index_fill_(0, _indices(ids, logits_V.device), -math.inf)
    return logits_V


def _force(ids: Ids, length: int, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Allow no other token ids than these after exactly ``length`` tokens."""
    if len(tokens) != length:
        return logits_V
    forced_V = torch.full_like(logits_V, -math.inf)
    forced_V[list(ids)] = 0.0
    return forced_V


def _raise_ends(ids: Ids, start: int, factor: float, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Raise the logits of token ids the more, the more tokens there are beyond ``start``."""
    beyond = len(tokens) - start
    if beyond <= 0:
        return logits_V
    where = torch.tensor(ids, device=logits_V.device)
    scores = logits_V[where]
    rise = (scores.abs() * (pow(factor, beyond) - 1)).masked_fill(~scores.isfinite(), 0.0)
    return logits_V.index_put((where,), scores + rise)


def _remove_invalid(tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    limits = torch.finfo(logits_V.dtype)
    return logits_V.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


def _without(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    return logits_V.index_fill(0, torch.tensor(ids, device=logits_V.device), -math.inf) if ids else logits_V


@lru_cache(maxsize=64)
def _indices(ids: Ids, device: torch.device) -> Tensor:
    """Token ids as a tensor, which takes longer to make than the logits of 90 tokens to fill."""
    return torch.tensor(ids, device=device)
