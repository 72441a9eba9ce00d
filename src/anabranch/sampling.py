"""Sampling. ``target_probs`` alone defines the next-token distribution, for verification and drafters alike.

The order is Hugging Face's: repetition penalty and processors, temperature, top-k, top-p, min-p. A constraint (a
grammar) comes after the processors, so that cuts and noise are among the tokens that it allows. Tokens that tie
with the last one kept by top-k or top-p are kept too, so the distribution does not depend on how a sort breaks ties.

Random draws depend only on the seed, the position of the sampled token and the candidate token:
``gumbels(position_keys(seed, positions), tokens)``. With the *matching* rule, speculative sampling with seed s
therefore emits exactly the tokens of plain sampling with seed s, whatever was drafted and however decoding was stepped.
A drafter may use the same noise, and so drafts better. (*Rejection* also spends random numbers on its decisions to
accept: the same distribution, but other tokens.)

Legend: N tree nodes, V vocabulary, M entries of a sum (blocks of the vocabulary), W words in a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anabranch.declared import CALL, LogitsProcessor, integer
from anabranch.errors import InputError
from anabranch.native.library import library

__all__ = [
    "Constraint",
    "LogitsProcessor",
    "SamplingParams",
    "argmax",
    "generator",
    "gumbels",
    "gumbels_of",
    "halves",
    "inverse_cdf",
    "log_probs",
    "penalised",
    "position_keys",
    "process_logits",
    "target_probs",
    "target_tokens",
    "top_log_probs",
]

BLOCK = 256  # vocabulary entries: inverse_cdf first sums blocks of them, to keep its float64 prefix sums short
NUCLEUS = 256  # the most probable tokens that top-p looks at before it sorts the whole vocabulary
SPAN = 4096  # positions whose keys are computed together; 32 KiB
MIN_TEMPERATURE = 1e-30  # lower temperatures are raised to it: they would overflow float32, for the same result
WORD = 2**64 - 1
GOLDEN, MASK = 0x9E3779B9, 2**32 - 1
HALF, SHIFTS = np.uint64(MASK), (np.uint64(0), np.uint64(32))


class Constraint(Protocol):
    """The tokens that may follow a text: a function of the text alone, so draft trees change nothing.

    All methods take all tokens up to and including a node, and raise InputError where they find that no token may
    follow.
    """

    def allowed(self, tokens: Sequence[int], vocabulary: int) -> NDArray[np.bool_]:
        """Return whether each token of the vocabulary [V] may follow."""

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        """``allowed(tokens)[token]``, without the rest of the vocabulary."""

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that probably follow, since no other text may; empty where there is a choice."""


@dataclass(frozen=True)
class SamplingParams:
    """The parameters that turn logits into the next-token distribution; the defaults are greedy decoding.

    temperature         0 is greedy: one-hot at the first of the largest logits
    top_k               keep the k most probable tokens; 0 is off
    top_p               keep the smallest set of tokens with at least this probability mass; 1 is off
    min_p               keep tokens at least this probable relative to the most probable one; 0 is off
    repetition_penalty  divide positive and multiply negative logits of tokens seen before (CTRL); 1 is off
    seed                any integer, taken modulo 2^64
    processors          applied in order after the penalty, to one node at a time with its own history
    constraint          forbids all tokens but those that it allows, after the processors; None: none

    Raises InputError for a value that is out of range or of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    processors: tuple[LogitsProcessor, ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            option = None if name == "constraint" else CALL[name]
            if option is not None and (check := integer if name == "seed" else option.check) is not None:
                check(name, value)

    @property
    def unconstrained(self) -> SamplingParams:
        """The parameters without a constraint, as drafters see them."""
        return self if self.constraint is None else replace(self, constraint=None)

    @property
    def greedy(self) -> bool:
        """Return whether each token is the most probable one: temperature 0."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Return whether the distribution at a node depends on earlier tokens other than through the logits."""
        return self.repetition_penalty != 1 or bool(self.processors) or self.constraint is not None

    @property
    def whole(self) -> bool:
        """Return whether the distribution is softmax(logits / temperature), with no token cut off and no penalty."""
        return not (self.cut or self.greedy or self.needs_history)

    @property
    def cut(self) -> bool:
        """Return whether improbable tokens are cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def process_logits(
    logits_NV: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Return float32 logits [N, V] whose softmax is the distribution; at temperature 0, whose argmax is the token.

    histories  [N] all tokens up to and including each node; required if ``params.needs_history``
    """
    logits_NV = logits_NV.float()
    if params.needs_history:
        logits_NV = _apply_history(logits_NV, params, histories)
    if params.greedy:
        return logits_NV  # nothing below changes which logit is the largest
    logits_NV = logits_NV / max(params.temperature, MIN_TEMPERATURE)  # a copy, so that masking can be in place
    if 0 < params.top_k < logits_NV.shape[-1]:
        weakest_N1 = logits_NV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_NV.masked_fill_(logits_NV < weakest_N1, -math.inf)
    if params.top_p < 1:
        _keep_nucleus(logits_NV, params.top_p)
    if params.min_p > 0:
        weakest_N1 = logits_NV.amax(dim=-1, keepdim=True) + math.log(params.min_p)
        logits_NV.masked_fill_(logits_NV < weakest_N1, -math.inf)
    return logits_NV


def target_probs(logits_NV: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Return the next-token distribution [N, V] after each node, float32.

    At temperature 0 it is one-hot at the largest logit, the first one in a tie. Rows whose logits are not finite are
    NaN.
    """
    logits_NV = process_logits(logits_NV, params, histories)
    if params.greedy:
        best_N1 = argmax(logits_NV)[:, None]
        one_hot = torch.zeros_like(logits_NV).scatter_(-1, best_N1.clamp(min=0), 1.0)
        return one_hot.masked_fill_(best_N1 < 0, math.nan)
    return logits_NV.softmax(dim=-1)


def target_tokens(
    logits_NV: Tensor,
    params: SamplingParams,
    keys_N: NDArray[np.uint64],
    histories: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the target's own token [N], int64, sampled from ``target_probs`` at every node.

    It is the argmax of the logits plus ``gumbels``, which is distributed as the softmax of the logits (the Gumbel-max
    trick). A drafter that uses the same noise mostly samples the same tokens from similar logits (Daliri et al. 2024).

    keys_N  ``position_keys`` of the sampled positions, equal for nodes of the same depth. Not read if greedy
    """
    if params.greedy:  # the argmax needs no noise
        return argmax(process_logits(logits_NV, params, histories) if params.needs_history else logits_NV)
    logits_NV = process_logits(logits_NV, params, histories)
    if (params.cut or params.constraint is not None) and logits_NV.device.type == "cpu":
        return _sampled_of_few(logits_NV, keys_N)
    distinct_K, which_N = np.unique(keys_N, return_inverse=True)
    noise_KV = gumbels(distinct_K, torch.arange(logits_NV.shape[-1], device=logits_NV.device))
    return argmax(logits_NV + noise_KV[torch.from_numpy(which_N.reshape(-1)).to(noise_KV.device)])


def _sampled_of_few(logits_NV: Tensor, keys_N: NDArray[np.uint64]) -> Tensor:
    """``argmax(logits + gumbels)`` with noise only for tokens that are not cut off.

    Noise for 49,152 tokens takes 1.5 ms a row, more than all else, and a nucleus has a few hundred.
    """
    rows_C, tokens_C = (logits_NV != -math.inf).nonzero(as_tuple=True)
    low_N, high_N = halves(keys_N)
    logits_NV[rows_C, tokens_C] += gumbels_of(low_N[rows_C], high_N[rows_C], tokens_C)
    return argmax(logits_NV)


def gumbels(keys_N: NDArray[np.uint64], tokens_V: Tensor) -> Tensor:
    """Return standard Gumbel noise [N, V], float32, as a function of a position's key and the token id alone.

    It is -log(-log(1 - v)), where v in (0, 1) is a 32-bit hash of both. On CPUs the native kernels compute it.
    """
    low_N, high_N = (half.to(tokens_V.device) for half in halves(keys_N))
    return gumbels_of(low_N[:, None], high_N[:, None], tokens_V)


def halves(keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of ``keys``, int64, in the same shape: the arguments of ``gumbels_of``."""
    low, high = (torch.from_numpy((keys >> shift & HALF).astype(np.int64)) for shift in SHIFTS)
    return low, high


def gumbels_of(low: Tensor, high: Tensor, tokens: Tensor) -> Tensor:
    """``gumbels`` of keys given as ``halves``; all three arguments broadcast."""
    if tokens.device.type == "cpu" and (kernels := library()) is not None:
        return kernels.gumbels(low, high, tokens.long())
    return _gumbels_in_torch(low, high, tokens)


def _gumbels_in_torch(low: Tensor, high: Tensor, tokens: Tensor) -> Tensor:
    x = (tokens.long() * GOLDEN + low) & MASK
    x = _hash(_hash(x) ^ high)
    v = ((x.double() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -(-torch.log1p(-v)).log().float()


def _hash(x: Tensor) -> Tensor:
    """The 32-bit hash "lowbias32" (Wellons), in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def inverse_cdf(probs_NV: Tensor, uniforms_N: ArrayLike | Tensor) -> Tensor:
    """Return the first token [N], int64, at which the cumulative sum of each row exceeds its uniform times the total.

    ``inverse_cdf([[0.5, 0.0, 0.5]], [0.5])`` is 2. Rows need not be normalised. Sums are in float64, and a token of
    probability 0 is never returned, whatever the rounding.
    """
    aim_N = torch.as_tensor(uniforms_N, dtype=torch.float64, device=probs_NV.device)
    probs_NMW = _blocks(probs_NV, 0.0)
    sums_NM = probs_NMW.sum(dim=-1, dtype=torch.float64)
    block_N, aim_N = _first_above(sums_NM, aim_N * sums_NM.sum(dim=-1))
    probs_NW = probs_NMW[torch.arange(len(block_N), device=block_N.device), block_N].double()
    word_N, _ = _first_above(probs_NW, aim_N)
    return block_N * BLOCK + word_N


def position_keys(seed: int, positions: ArrayLike, lane: int = 0) -> NDArray[np.uint64]:
    """Return 64 random bits, in the shape of ``positions``, for each position at which a token is sampled.

    Counter-based (Philox, key (seed, lane), counter = position): a position's key does not depend on which other
    positions were requested, nor when. Lane 0 is for the target's own tokens and lane 1 is ``generator``'s default;
    draws that must be independent of both, such as drafts for the rejection rule, use another lane.
    """
    where = np.asarray(positions, np.int64)
    if where.size == 0:
        return np.zeros(where.shape, np.uint64)
    first, last = int(where.min()), int(where.max())
    assert first >= 0, "positions start at 0"
    if first // SPAN == last // SPAN:
        return _span(seed, lane, first // SPAN)[where % SPAN]
    keys = np.empty(where.shape, np.uint64)
    for number in np.unique(where // SPAN).tolist():
        inside = where // SPAN == number
        keys[inside] = _span(seed, lane, number)[where[inside] % SPAN]
    return keys


def generator(seed: int, position: int, lane: int = 1) -> np.random.Generator:
    """Return the random generator of the step whose first token is sampled at ``position``; ``reject`` reads from it.

    Every step emits at least one token, so no two steps of a sequence share a generator.
    """
    counter = np.array([0, position, 0, 0], np.uint64)  # the second word, so that each position has 2^64 blocks
    return np.random.Generator(np.random.Philox(key=_key(seed, lane), counter=counter))


def log_probs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the raw log probability [N], float32, of one token per row: without temperature or masks."""
    logits_NV = logits_NV.float()
    return logits_NV.gather(-1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)


def top_log_probs(logits_NV: Tensor, most: int) -> list[dict[int, float]]:
    """Return the ``most`` largest raw log probabilities of each row by token id, the largest first."""
    best = logits_NV.float().log_softmax(dim=-1).topk(most, dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [dict(zip(tokens, values, strict=True)) for tokens, values in pairs]


def _apply_history(logits_NV: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None) -> Tensor:
    if histories is None or len(histories) != len(logits_NV):
        raise InputError("penalties, processors and constraints need the tokens before each row; pass histories")
    rows = []
    for logits_V, history in zip(logits_NV, histories, strict=True):
        if params.repetition_penalty != 1:
            logits_V = penalised(logits_V, history, params.repetition_penalty)
        if params.processors:
            logits_V = logits_V.clone()  # a processor may write in place, but not into the raw logits
        for processor in params.processors:
            before = logits_V.shape
            logits_V = processor(history, logits_V)
            if not isinstance(logits_V, Tensor):
                raise InputError(f"a logits processor must return a tensor of logits, got {type(logits_V).__name__}")
            if logits_V.shape != before:
                raise InputError(
                    f"a logits processor must return logits of shape {tuple(before)}, got {tuple(logits_V.shape)}"
                )
        if params.constraint is not None:
            allowed_V = torch.from_numpy(params.constraint.allowed(history, len(logits_V)))
            logits_V = logits_V.masked_fill(~allowed_V.to(logits_V.device), -math.inf)
        if params.processors and float(logits_V.amax()) == -math.inf:
            raise InputError(_forbidden(params))
        rows.append(logits_V.float())
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]


def _forbidden(params: SamplingParams) -> str:
    if params.constraint is not None:
        return (
            "the options or logits processors forbid every token that the schema, regex or grammar allows; leave one "
            "of them a logit above -inf"
        )
    return "the options or logits processors forbid every token; leave at least one logit above -inf"


def penalised(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """Logits in which those of ``tokens`` are divided by ``penalty`` if positive, and multiplied by it if negative.

    Tokens that have no logit are ignored: a draft model's vocabulary may be smaller than the target's.
    """
    seen = torch.as_tensor(tokens, dtype=torch.long, device=logits_V.device)
    seen = seen[seen < len(logits_V)]
    scores = logits_V[seen]
    return logits_V.scatter(0, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def _keep_nucleus(logits_NV: Tensor, top_p: float) -> None:
    probs_NV = logits_NV.softmax(dim=-1)
    vocabulary = probs_NV.shape[-1]
    # On a CPU, sorting a vocabulary takes 5 ms per row, more than the forward pass of many models, and most nuclei are
    # small. On an accelerator, sorting is faster than the synchronisation that would tell whether it is needed.
    few = min(NUCLEUS, vocabulary) if probs_NV.device.type == "cpu" else vocabulary
    top_NW = probs_NV.topk(few, dim=-1).values if few < vocabulary else probs_NV.sort(-1, descending=True).values
    weakest_N = _weakest_of_nucleus(top_NW, top_p)
    if few < vocabulary:
        short_N = top_NW.sum(dim=-1, dtype=torch.float64) < top_p
        for row in short_N.nonzero()[:, 0].tolist():
            weakest_N[row] = _weakest_of_large_nucleus(probs_NV[row], top_p)
    logits_NV.masked_fill_(probs_NV < weakest_N[:, None], -math.inf)


def _weakest_of_large_nucleus(probs_V: Tensor, top_p: float) -> Tensor:
    """The lowest probability in the nucleus of one row, sorted only as far as necessary."""
    few = min(8 * NUCLEUS, len(probs_V))
    top_W = probs_V.topk(few).values
    if few < len(probs_V) and float(top_W.sum(dtype=torch.float64)) < top_p:
        top_W = probs_V.sort(descending=True).values
    return _weakest_of_nucleus(top_W, top_p)


def _weakest_of_nucleus(descending_NW: Tensor, top_p: float) -> Tensor:
    before_NW = descending_NW.cumsum(dim=-1, dtype=torch.float64) - descending_NW
    return descending_NW.masked_fill(before_NW >= top_p, math.inf).amin(dim=-1)


def argmax(logits_NV: Tensor) -> Tensor:
    """Return the first index of the largest entry [N]; -1 for a row whose largest entry is not finite.

    NaN counts as the largest, so a row with any NaN gives -1. PyTorch vectorises amax but not argmax, so float32 on a
    CPU is searched by NumPy, 18 times faster, and other types in blocks, 16 times faster for bfloat16 on a CPU.
    """
    if logits_NV.is_cpu and logits_NV.dtype == torch.float32:
        rows_NV = logits_NV.detach().numpy()
        places_N = rows_NV.argmax(axis=-1)
        largest_N = np.take_along_axis(rows_NV, places_N[:, None], axis=-1)[:, 0]
        return torch.from_numpy(np.where(np.isfinite(largest_N), places_N, -1))
    logits_NMW = _blocks(logits_NV, -math.inf)
    largest_NM = logits_NMW.amax(dim=-1)
    block_N = largest_NM.argmax(dim=-1)
    rows_N = torch.arange(len(logits_NMW), device=block_N.device)
    best_N = block_N * BLOCK + logits_NMW[rows_N, block_N].argmax(dim=-1)
    return torch.where(largest_NM[rows_N, block_N].isfinite(), best_N, -1)


def _blocks(values_NV: Tensor, filler: float) -> Tensor:
    rows, vocabulary = values_NV.shape
    blocks = -(-vocabulary // BLOCK)
    if blocks * BLOCK != vocabulary:
        values_NV = torch.nn.functional.pad(values_NV, (0, blocks * BLOCK - vocabulary), value=filler)
    return values_NV.reshape(rows, blocks, BLOCK)


def _first_above(weights_NM: Tensor, aim_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index at which each row's cumulative sum first exceeds its aim, and the rest of the aim before it."""
    sums_NM = weights_NM.cumsum(dim=-1)
    positive_NM = weights_NM > 0  # a parallel scan may round up at an entry of weight 0
    beyond_NM = positive_NM & (sums_NM > aim_N[:, None])
    last_N = weights_NM.shape[-1] - 1 - positive_NM.flip(-1).byte().argmax(dim=-1)
    index_N = torch.where(beyond_NM.any(dim=-1), beyond_NM.byte().argmax(dim=-1), last_N)
    start_N = (sums_NM - weights_NM).gather(-1, index_N[:, None])[:, 0]
    return index_N, (aim_N - start_N).clamp(min=0)


@lru_cache(maxsize=64)
def _span(seed: int, lane: int, number: int) -> NDArray[np.uint64]:
    """The keys of positions SPAN * number, SPAN * number + 1, ...; cached, since consecutive steps use neighbours."""
    counter = np.array([number * SPAN, 0, 0, 0], np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(key=_key(seed, lane), counter=counter).random_raw(4 * SPAN)
    keys: NDArray[np.uint64] = words[::4].copy()
    return keys


def _key(seed: int, lane: int) -> NDArray[np.uint64]:
    return np.array([int(seed) & WORD, int(lane) & WORD], np.uint64)
