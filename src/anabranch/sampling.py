"""One function owns the distribution: ``target_probs``. Verification and drafters alike draw from it.

The order is Hugging Face's: repetition penalty and processors, temperature, top-k, top-p, min-p. Tokens that tie
with the last one that top-k or top-p keeps are kept too, so the law does not depend on how a sort breaks ties.

Noise belongs to positions, not to steps: ``gumbels(position_keys(seed, positions), tokens)`` is a function of the seed,
the absolute position of the token that is drawn, and each token that it may be. With the *matching* rule, speculative
sampling with seed s therefore emits exactly the tokens that plain sampling with seed s emits, whatever the drafter
proposed and however decoding was stepped. A drafter may know the noise too, and guesses better for it. (*rejection*
spends its noise on accept decisions as well: the same law, other tokens.)

Legend: N tree nodes, V vocabulary, M entries of a sum (blocks of the vocabulary), W words in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anabranch.errors import InputError

__all__ = [
    "LogitsProcessor",
    "SamplingParams",
    "argmax",
    "generator",
    "gumbels",
    "gumbels_of",
    "halves",
    "inverse_cdf",
    "log_probs",
    "position_keys",
    "process_logits",
    "target_probs",
    "target_tokens",
]

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""(all tokens up to and including the node, logits [V]) -> logits [V]; -inf forbids a token."""

BLOCK = 256  # of the vocabulary: inverse_cdf sums blocks first, so its float64 prefix sums stay short
NUCLEUS = 256  # candidates that top-p looks at before it sorts the whole vocabulary
SPAN = 4096  # positions that one run of the counter covers; 32 KiB of keys
COLDEST = 1e-30  # a smaller temperature would overflow float32 and changes nothing
WORD = 2**64 - 1
GOLDEN, MASK = 0x9E3779B9, 2**32 - 1
HALF, SHIFTS = np.uint64(MASK), (np.uint64(0), np.uint64(32))


@dataclass(frozen=True)
class SamplingParams:
    """What turns logits into the law that tokens are drawn from; the defaults are greedy decoding.

    temperature         0 is greedy: one-hot at the first largest logit
    top_k               keep the k most probable tokens; 0 is off
    top_p               keep the smallest set of tokens that holds this mass; 1 is off
    min_p               keep tokens at least this probable relative to the most probable one; 0 is off
    repetition_penalty  divide positive and multiply negative logits of tokens seen before (CTRL); 1 is off
    seed                of the noise, any integer; counts modulo 2^64
    processors          applied in order after the penalty, one node at a time on its own history

    Raises InputError for a value that means nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
                raise InputError(f"{name} must be a number, not {value!r}.")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise InputError(f"{name} must be an integer, not {value!r}.")
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}.")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (off) or a positive integer, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be greater than 0 and at most 1 (off), not {self.top_p}.")
        if not 0 <= self.min_p < 1:
            raise InputError(f"min_p must be at least 0 (off) and less than 1, not {self.min_p}.")
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty must be a positive number (1 is off), not {self.repetition_penalty}.")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the law at a node depends on the tokens before it other than through the logits."""
        return self.repetition_penalty != 1 or bool(self.processors)

    @property
    def whole(self) -> bool:
        """Whether the law is the softmax of logits / temperature, nothing cut off and nothing added."""
        uncut = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
        return uncut and not self.greedy and not self.needs_history


def process_logits(
    logits_NV: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Return float32 logits [N, V] whose softmax is the law; at temperature 0, whose argmax is.

    histories  [N] all tokens up to and including each node; needed where ``params.needs_history``
    """
    logits_NV = logits_NV.float()
    if params.needs_history:
        logits_NV = _apply_history(logits_NV, params, histories)
    if params.greedy:
        return logits_NV  # nothing below moves the largest logit
    logits_NV = logits_NV / max(params.temperature, COLDEST)  # a copy of our own, so that masks work in place
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
    """Return the law [N, V], float32, that the next token after each node is drawn from.

    At temperature 0 it is one-hot at the largest logit, the first one where several tie. It is NaN where the logits are
    not finite numbers.
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
    """Return the target's own token [N], int64, drawn from ``target_probs`` at every node.

    It is the largest of logits plus ``gumbels``: the law of that is the softmax of the logits (Gumbel's trick). A
    drafter that knows the noise draws the like from logits that are alike (Daliri et al. 2024).

    keys_N  of the positions that are drawn (``position_keys``); nodes of one depth share theirs. Not read when greedy
    """
    if params.greedy:  # the same law without noise
        return argmax(process_logits(logits_NV, params, histories) if params.needs_history else logits_NV)
    logits_NV = process_logits(logits_NV, params, histories)
    distinct_K, which_N = np.unique(keys_N, return_inverse=True)
    noise_KV = gumbels(distinct_K, torch.arange(logits_NV.shape[-1], device=logits_NV.device))
    return argmax(logits_NV + noise_KV[torch.from_numpy(which_N.reshape(-1)).to(noise_KV.device)])


def gumbels(keys_N: NDArray[np.uint64], tokens_V: Tensor) -> Tensor:
    """Return noise [N, V], float32, of the standard Gumbel law: a function of a position's key and the token id alone.

    -log(-log(1 - v)) of v in (0, 1), which is a hash of 32 bits of both. The native kernels compute the same.
    """
    low_N, high_N = (half.to(tokens_V.device) for half in halves(keys_N))
    return gumbels_of(low_N[:, None], high_N[:, None], tokens_V)


def halves(keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of keys, int64, in their shape: what ``gumbels_of`` reads on a device."""
    low, high = (torch.from_numpy((keys >> shift & HALF).astype(np.int64)) for shift in SHIFTS)
    return low, high


def gumbels_of(low: Tensor, high: Tensor, tokens: Tensor) -> Tensor:
    """``gumbels`` of keys in halves and tokens that broadcast with them."""
    x = (tokens.long() * GOLDEN + low) & MASK
    x = _mixed(_mixed(x) ^ high)
    v = ((x.double() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -(-torch.log1p(-v)).log().float()


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits (Wellons' "lowbias32"), in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def inverse_cdf(probs_NV: Tensor, uniforms_N: ArrayLike | Tensor) -> Tensor:
    """Return the first token [N], int64, at which the running sum of each row exceeds its uniform times the total.

    ``inverse_cdf([[0.5, 0.0, 0.5]], [0.5])`` is 2. Rows need not be normalised. Sums run in float64, and a token of
    probability 0 is never returned, however the sums round.
    """
    aim_N = torch.as_tensor(uniforms_N, dtype=torch.float64, device=probs_NV.device)
    probs_NMW = _blocks(probs_NV, 0.0)
    sums_NM = probs_NMW.sum(dim=-1, dtype=torch.float64)
    block_N, aim_N = _cross(sums_NM, aim_N * sums_NM.sum(dim=-1))
    probs_NW = probs_NMW[torch.arange(len(block_N), device=block_N.device), block_N].double()
    word_N, _ = _cross(probs_NW, aim_N)
    return block_N * BLOCK + word_N


def position_keys(seed: int, positions: ArrayLike, lane: int = 0) -> NDArray[np.uint64]:
    """Return 64 random bits, in the shape of ``positions``, for each position that a token is drawn at.

    Counter-based (Philox, key (seed, lane), counter = position): a position's key does not depend on which other
    positions were asked for, nor when. Lane 0 is the target's own draws, lane 1 ``generator``'s default; whatever
    must be independent of both, such as drafts that *rejection* will judge, takes another lane.
    """
    where = np.asarray(positions, np.int64)
    if where.size == 0:
        return np.zeros(where.shape, np.uint64)
    first, last = int(where.min()), int(where.max())
    assert first >= 0, "positions count from 0"
    if first // SPAN == last // SPAN:
        return _span(seed, lane, first // SPAN)[where % SPAN]
    keys = np.empty(where.shape, np.uint64)
    for number in np.unique(where // SPAN).tolist():
        inside = where // SPAN == number
        keys[inside] = _span(seed, lane, number)[where[inside] % SPAN]
    return keys


def generator(seed: int, position: int, lane: int = 1) -> np.random.Generator:
    """Return the source of fresh uniforms for the step whose first token is drawn at ``position``.

    Every step emits at least one token, so no two steps of one sequence share a source. ``reject`` reads from it.
    """
    counter = np.array([0, position, 0, 0], np.uint64)  # the second word: 2^64 blocks to each position
    return np.random.Generator(np.random.Philox(key=_key(seed, lane), counter=counter))


def log_probs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the raw log probability [N], float32, of one token a row: no temperature, no masks."""
    logits_NV = logits_NV.float()
    return logits_NV.gather(-1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)


def _apply_history(logits_NV: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None) -> Tensor:
    if histories is None or len(histories) != len(logits_NV):
        raise InputError("repetition_penalty and logits processors need the tokens before each row: pass histories.")
    rows = []
    for logits_V, history in zip(logits_NV, histories, strict=True):
        if params.repetition_penalty != 1 and len(history):
            seen = torch.as_tensor(history, dtype=torch.long, device=logits_V.device)
            scores = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V = logits_V.scatter(0, seen, torch.where(scores < 0, scores * penalty, scores / penalty))
        if params.processors:
            logits_V = logits_V.clone()  # a processor may write in place, and the raw logits are not its own
        for processor in params.processors:
            before = logits_V.shape
            logits_V = processor(history, logits_V)
            if not isinstance(logits_V, Tensor):
                raise InputError(f"A logits processor returned {type(logits_V).__name__}, not a tensor of logits.")
            if logits_V.shape != before:
                raise InputError(f"A logits processor returned the shape {tuple(logits_V.shape)}, not {tuple(before)}.")
        if params.processors and not bool((logits_V > -math.inf).any()):
            raise InputError("The logits processors forbid every token: leave at least one logit above -inf.")
        rows.append(logits_V.float())
    return torch.stack(rows)


def _keep_nucleus(logits_NV: Tensor, top_p: float) -> None:
    probs_NV = logits_NV.softmax(dim=-1)
    vocabulary = probs_NV.shape[-1]
    # Sorting a vocabulary costs a CPU 5 ms a row, more than many models' forward, and most nuclei are small; an
    # accelerator sorts faster than it answers whether it must.
    few = min(NUCLEUS, vocabulary) if probs_NV.device.type == "cpu" else vocabulary
    top_NW = probs_NV.topk(few, dim=-1).values if few < vocabulary else probs_NV.sort(-1, descending=True).values
    weakest_N = _weakest_of_nucleus(top_NW, top_p)
    if few < vocabulary:
        short_N = top_NW.sum(dim=-1, dtype=torch.float64) < top_p
        for row in short_N.nonzero()[:, 0].tolist():
            weakest_N[row] = _weakest_of_nucleus(probs_NV[row].sort(descending=True).values, top_p)
    logits_NV.masked_fill_(probs_NV < weakest_N[:, None], -math.inf)


def _weakest_of_nucleus(descending_NW: Tensor, top_p: float) -> Tensor:
    before_NW = descending_NW.cumsum(dim=-1, dtype=torch.float64) - descending_NW
    return descending_NW.masked_fill(before_NW >= top_p, math.inf).amin(dim=-1)


def argmax(logits_NV: Tensor) -> Tensor:
    """Return the first index of the largest entry [N]; -1 for a row whose largest entry is not a finite number.

    NaN counts as largest, so one NaN in a row gives -1 too. By blocks: the maximum is vectorised where its index is
    not, 16 times faster for bfloat16 on a CPU.
    """
    logits_NMW = _blocks(logits_NV, -math.inf)
    largest_NM = logits_NMW.amax(dim=-1)
    block_N = largest_NM.argmax(dim=-1)
    rows_N = torch.arange(len(logits_NMW), device=block_N.device)
    found_N = block_N * BLOCK + logits_NMW[rows_N, block_N].argmax(dim=-1)
    return torch.where(largest_NM[rows_N, block_N].isfinite(), found_N, -1)


def _blocks(values_NV: Tensor, filler: float) -> Tensor:
    rows, vocabulary = values_NV.shape
    blocks = -(-vocabulary // BLOCK)
    if blocks * BLOCK != vocabulary:
        values_NV = torch.nn.functional.pad(values_NV, (0, blocks * BLOCK - vocabulary), value=filler)
    return values_NV.reshape(rows, blocks, BLOCK)


def _cross(weights_NM: Tensor, aim_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the running sum of each row first exceeds its aim, and the aim left over inside that entry."""
    sums_NM = weights_NM.cumsum(dim=-1)
    positive_NM = weights_NM > 0  # a parallel scan may round up where the weight is 0
    beyond_NM = positive_NM & (sums_NM > aim_N[:, None])
    last_N = weights_NM.shape[-1] - 1 - positive_NM.flip(-1).byte().argmax(dim=-1)
    index_N = torch.where(beyond_NM.any(dim=-1), beyond_NM.byte().argmax(dim=-1), last_N)
    start_N = (sums_NM - weights_NM).gather(-1, index_N[:, None])[:, 0]
    return index_N, (aim_N - start_N).clamp(min=0)


@lru_cache(maxsize=64)
def _span(seed: int, lane: int, number: int) -> NDArray[np.uint64]:
    """The keys of positions SPAN number, SPAN number + 1, ...: made once, since every step asks for its neighbours."""
    counter = np.array([number * SPAN, 0, 0, 0], np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(key=_key(seed, lane), counter=counter).random_raw(4 * SPAN)
    keys: NDArray[np.uint64] = words[::4].copy()
    return keys


def _key(seed: int, lane: int) -> NDArray[np.uint64]:
    return np.array([int(seed) & WORD, int(lane) & WORD], np.uint64)
