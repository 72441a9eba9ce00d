"""Counts n-grams in bounded memory, and turns the counts into the arrays of a Katz back-off trigram model.

Token ids are read in chunks. The bigrams and trigrams of a chunk, packed in one integer each, are sorted and written
with their counts as a *run*; runs are merged block by block. Every level is then a list that is sorted by context:

    starts2 [V + 1]   where the bigrams of each first token begin
    tokens2 [n2]      their second tokens, ascending;  counts2 [n2];  best2 [n2] places by falling count
    starts3 [n2 + 1]  where the trigrams that continue each bigram begin
    tokens3 [n3]      their third tokens, by falling count;  counts3 [n3]
    unigram [V]       the distribution without a context
    norm2, alpha2 [V], norm3, alpha3 [n2]    what discounted counts of a context are divided by, and its back-off weight

V vocabulary, n2 and n3 distinct bigrams and trigrams.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.drafting.tables import ArrayWriter, Documents, Report, write_array
from anabranch.errors import InputError

__all__ = ["LARGEST", "build", "discounts", "merged"]

BITS = np.uint64(21)  # of a token id in a packed n-gram
LARGEST = 1 << int(BITS)
MASK = np.uint64(LARGEST - 1)
KATZ = 5  # counts above this are not discounted (Katz 1987)
BYTES_A_TOKEN, BYTES_AN_ENTRY = 96, 160  # that counting a token of a chunk and merging an entry of a run take
MOST = 2**32 - 1
NOTHING = 1e-6  # a probability that rounding may leave

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]


def build(documents: Documents, vocab_size: int, folder: Path, memory: int, report: Report) -> dict[str, Any]:
    """Write the arrays of a model into ``folder``; see ``Tables.build``."""
    if vocab_size > LARGEST:
        raise InputError(f"n-grams are counted for vocabularies of at most {LARGEST:,} tokens, got {vocab_size:,}")
    scratch = folder / "scratch"
    scratch.mkdir()
    runs2, runs3, unigrams, count = _count(documents, vocab_size, scratch, memory // BYTES_A_TOKEN, report)
    if count == 0:
        raise InputError("there are no tokens to count; give a longer text")
    block = max(1024, memory // BYTES_AN_ENTRY)
    entries = [_merge(runs, scratch / f"order{n}", block) for n, runs in ((2, runs2), (3, runs3))]
    report(f"{count:,} tokens counted: {entries[0]:,} bigrams, {entries[1]:,} trigrams")
    falls = [discounts(_counts_of_counts(unigrams, block))]
    falls += [discounts(_counts_of_counts(_opened(scratch / f"order{n}", "counts"), block)) for n in (2, 3)]
    base = _unigram(unigrams, falls[0])
    write_array(folder, "unigram", "<f4", base)
    _bigrams(folder, scratch / "order2", base, falls[1], block)
    _trigrams(folder, scratch, base, falls[1:], block)
    shutil.rmtree(scratch)
    return {
        "tokens": count,
        "bigrams": entries[0],
        "trigrams": entries[1],
        "discounts": {str(n): fall.tolist() for n, fall in enumerate(falls, 1)},
    }


# --- counting -------------------------------------------------------------------------------------------------------
def _count(
    documents: Documents, vocab_size: int, scratch: Path, chunk: int, report: Report
) -> tuple[list[Path], list[Path], Counts, int]:
    """Write a run of bigrams and one of trigrams a chunk; returns their folders, the unigram counts [V] and tokens."""
    unigrams = np.zeros(vocab_size, np.int64)
    runs: tuple[list[Path], list[Path]] = ([], [])
    held: list[NDArray[np.int64]] = []
    waiting = seen = 0

    def flush() -> None:
        nonlocal waiting
        tokens, ends = np.concatenate(held), np.cumsum([len(part) for part in held])
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise InputError(f"the text has token ids outside the vocabulary of {vocab_size:,} tokens")
        unigrams[:] += np.bincount(tokens, minlength=vocab_size)
        for n, paths in zip((2, 3), runs, strict=True):
            path = scratch / f"run{n}-{len(paths)}"
            _write_run(path, *_distinct(_packed(tokens, ends, n)))
            paths.append(path)
        held.clear()
        waiting = 0
        report(f"{seen:,} tokens read")

    for document in documents:
        held.append(document)
        waiting, seen = waiting + len(document), seen + len(document)
        if waiting >= chunk:
            flush()
    if held:
        flush()
    return *runs, unigrams, seen


def _packed(tokens: NDArray[np.int64], ends: NDArray[np.int64], n: int) -> Keys:
    """The n-grams that lie within one document, one integer each."""
    size = len(tokens) - n + 1
    if size < 1:
        return np.zeros(0, np.uint64)
    ids = tokens.astype(np.uint64)
    keys = ids[:size].copy()
    for shift in range(1, n):
        keys = (keys << BITS) | ids[shift : shift + size]
    inside = np.ones(size, bool)
    for back in range(1, n):  # the n-grams that begin ``back`` tokens before the end of a document leave it
        crossing = ends - back
        inside[crossing[(crossing >= 0) & (crossing < size)]] = False
    kept: Keys = keys[inside]
    return kept


def _distinct(keys: Keys, counts: Counts | None = None) -> tuple[Keys, Counts]:
    """Distinct keys, ascending, and how often each occurs (or the sum of its ``counts``)."""
    if counts is None:
        keys = np.sort(keys)
    else:
        order = np.argsort(keys, kind="stable")  # merges what is sorted piece by piece
        keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
    sums = np.diff(np.append(first, len(keys))) if counts is None else _sums(counts, first)
    return keys[first], sums


def _sums(values: NDArray[Any], first: NDArray[np.int64]) -> NDArray[Any]:
    return np.add.reduceat(values, first) if len(first) else values[:0]


def _write_run(path: Path, keys: Keys, counts: Counts) -> None:
    path.mkdir()
    for name, values in (("keys", keys), ("counts", counts)):
        write_array(path, name, values.dtype.str, values)


def _opened(path: Path, name: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return array


# --- merging --------------------------------------------------------------------------------------------------------
def merged(runs: Sequence[tuple[Keys, Counts]], block: int) -> Iterator[tuple[Keys, Counts]]:
    """Merge runs of ascending distinct keys; yields the same in ascending blocks of about ``block`` entries."""
    at = [0] * len(runs)
    while live := [i for i, (keys, _) in enumerate(runs) if at[i] < len(keys)]:
        size = max(1, block // len(live))
        ends = {i: min(at[i] + size, len(runs[i][0])) for i in live}
        bound = min(runs[i][0][ends[i] - 1] for i in live)  # beyond it, a run may have keys that were not looked at
        keys, counts = [], []
        for i in live:
            here = runs[i][0][at[i] : ends[i]]
            count = int(np.searchsorted(here, bound, side="right"))
            keys.append(here[:count])
            counts.append(runs[i][1][at[i] : at[i] + count])
            at[i] += count
        yield _distinct(np.concatenate(keys), np.concatenate(counts))


def _merge(runs: Sequence[Path], out: Path, block: int) -> int:
    """Merge runs into one, delete them, and return its length."""
    out.mkdir()
    tables = [(_opened(run, "keys"), _opened(run, "counts")) for run in runs]
    with ArrayWriter(out, "keys", "<u8") as keys_out, ArrayWriter(out, "counts", "<i8") as counts_out:
        for keys, counts in merged(tables, block):
            keys_out.append(keys)
            counts_out.append(counts)
    for run in runs:
        shutil.rmtree(run)
    return keys_out.length


# --- Katz -----------------------------------------------------------------------------------------------------------
def _counts_of_counts(counts: Counts, block: int) -> list[int]:
    """Numbers of n-grams that occur 1, 2, ... KATZ + 1 times."""
    totals = np.zeros(KATZ + 2, np.int64)
    for first in range(0, len(counts), block):
        totals += np.bincount(np.minimum(counts[first : first + block], KATZ + 2), minlength=KATZ + 3)[: KATZ + 2]
    return [int(n) for n in totals[1:]]


def discounts(n: Sequence[int]) -> NDArray[np.float64]:
    """Factors [KATZ + 2] of the counts 0, 1, ... KATZ and all above, from how many n-grams occur 1, 2, ... times.

    Good-Turing as in Katz (1987): d_r = (r* / r - A) / (1 - A), r* = (r + 1) n_(r+1) / n_r, A = (k + 1) n_(k+1) / n_1.
    Where counts of counts are too irregular for it, as in a short text, d_r = (r - D) / r with D = n_1 / (n_1 + 2 n_2).
    Larger counts stay larger, and something is always left for what was not seen after a rare successor.
    """
    r = np.arange(1, KATZ + 1)
    if all(n[: KATZ + 1]):
        seen = np.array(n[: KATZ + 1], np.float64)
        above = (KATZ + 1) * seen[KATZ] / seen[0]
        if above < 1:
            factors = ((r + 1) * seen[1:] / (seen[:-1] * r) - above) / (1 - above)
            values = np.append(factors * r, KATZ + 1.0)
            if 0 < factors[0] < 1 and (factors <= 1).all() and (np.diff(values) >= 0).all():
                return np.concatenate(([0.0], factors, [1.0]))
    less = n[0] / (n[0] + 2 * n[1]) if n[0] and n[1] else 0.5
    return np.concatenate(([0.0], (r - less) / r, [1.0]))


def _discounted(counts: NDArray[Any], fall: NDArray[np.float64]) -> NDArray[np.float64]:
    kept: NDArray[np.float64] = counts * fall[np.minimum(counts, KATZ + 1)]
    return kept


def _unigram(counts: Counts, fall: NDArray[np.float64]) -> NDArray[np.float32]:
    """[V] discounted frequencies; what is left is shared by the tokens that do not occur."""
    values, unseen = _discounted(counts, fall), counts == 0
    if unseen.any():
        left = counts.sum() - values.sum()
        values[unseen] = max(left, 1.0) / unseen.sum()
    probs: NDArray[np.float32] = (values / values.sum()).astype(np.float32)
    return probs


def _by_count(tokens: Counts, counts: Counts, begins: Counts) -> tuple[Counts, Counts]:
    """The order of successors by context and falling count, and the context of each; contexts begin at ``begins``."""
    lengths = np.diff(begins)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.lexsort((tokens, -counts, owner)), owner


def _backoff(
    counts: Counts, fall: NDArray[np.float64], lower: NDArray[np.float64], begins: Counts, vocab_size: int
) -> tuple[Counts, NDArray[np.float64], NDArray[np.float64]]:
    """The contexts that have successors, with their norms and back-off weights.

    lower  the lower order's probabilities of the successors. Where they are all tokens there is nothing to back off to
    """
    lengths = np.diff(begins)
    at = np.flatnonzero(lengths)
    totals, kept, seen = (_sums(values, begins[at]) for values in (counts, _discounted(counts, fall), lower))
    rest = 1.0 - seen
    full = (lengths[at] == vocab_size) | (rest < NOTHING)
    norm = np.where(full, kept, totals)
    alpha = np.where(full, 0.0, (1.0 - kept / totals) / np.where(full, 1.0, rest))
    return at, norm, np.maximum(alpha, 0.0)


def _bigrams(folder: Path, merged2: Path, base: NDArray[np.float32], fall: NDArray[np.float64], block: int) -> None:
    """Write the level of bigrams, context by context."""
    keys, counts = _opened(merged2, "keys"), _opened(merged2, "counts")
    vocab_size = len(base)
    starts = np.searchsorted(keys, np.arange(vocab_size + 1, dtype=np.uint64) << BITS).astype(np.int64)
    norm, alpha = np.zeros(vocab_size), np.ones(vocab_size)
    names = {"tokens2": "<u4", "counts2": "<u4", "best2": "<u4"}
    with ExitStack() as stack:
        out = {name: stack.enter_context(ArrayWriter(folder, name, kind)) for name, kind in names.items()}
        for low, high in _spans(starts, block):
            first, last = int(starts[low]), int(starts[high])
            tokens, here = (keys[first:last] & MASK).astype(np.int64), np.asarray(counts[first:last])
            begins = starts[low : high + 1] - first
            order, owner = _by_count(tokens, here, begins)
            out["tokens2"].append(tokens)
            out["counts2"].append(np.minimum(here, MOST))
            out["best2"].append(order - begins[owner])
            at, *weights = _backoff(here, fall, base[tokens].astype(np.float64), begins, vocab_size)
            norm[low + at], alpha[low + at] = weights
    for name, values, kind in (("starts2", starts, "<i8"), ("norm2", norm, "<f4"), ("alpha2", alpha, "<f4")):
        write_array(folder, name, kind, values)


def _trigrams(
    folder: Path, scratch: Path, base: NDArray[np.float32], falls: Sequence[NDArray[np.float64]], block: int
) -> None:
    """Write the level of trigrams: for each bigram, in the order of the bigrams, what followed it."""
    keys2, counts2 = _opened(scratch / "order2", "keys"), _opened(scratch / "order2", "counts")
    keys3, counts3 = _opened(scratch / "order3", "keys"), _opened(scratch / "order3", "counts")
    norm2 = np.load(folder / "norm2.npy")
    names = {"tokens3": "<u4", "counts3": "<u4", "starts3": "<i8", "norm3": "<f4", "alpha3": "<f4"}
    with ExitStack() as stack:
        out = {name: stack.enter_context(ArrayWriter(folder, name, kind)) for name, kind in names.items()}
        at3 = 0
        for first in range(0, len(keys2), max(1, block // 4)):
            contexts = np.asarray(keys2[first : first + max(1, block // 4)])
            starts = at3 + np.searchsorted(
                keys3[at3:], np.append(contexts << BITS, (contexts[-1] + np.uint64(1)) << BITS)
            )
            out["starts3"].append(starts[:-1])
            norm, alpha = np.zeros(len(contexts)), np.ones(len(contexts))
            for low, high in _spans(starts, block):
                begin, end = int(starts[low]), int(starts[high])
                here, packed = np.asarray(counts3[begin:end]), np.asarray(keys3[begin:end])
                begins = starts[low : high + 1] - begin
                tokens = (packed & MASK).astype(np.int64)
                order, _ = _by_count(tokens, here, begins)
                out["tokens3"].append(tokens[order])
                out["counts3"].append(np.minimum(here[order], MOST))
                # every trigram's last two tokens are a bigram: its probability is what the trigram would back off to
                place = np.searchsorted(keys2, packed & ((MASK << BITS) | MASK))
                middle = (packed >> BITS & MASK).astype(np.int64)
                lower = _discounted(counts2[place], falls[0]) / norm2[middle]
                at, *weights = _backoff(here, falls[1], lower, begins, len(base))
                norm[low + at], alpha[low + at] = weights
            out["norm3"].append(norm)
            out["alpha3"].append(alpha)
            at3 = int(starts[-1])
        out["starts3"].append(np.array([at3]))


def _spans(starts: NDArray[np.int64], block: int) -> Iterator[tuple[int, int]]:
    """Ranges of contexts that have about ``block`` entries together, at least one context each."""
    low = 0
    while low < len(starts) - 1:
        high = int(np.searchsorted(starts, starts[low] + block, side="right")) - 1
        high = min(max(high, low + 1), len(starts) - 1)
        yield low, high
        low = high
