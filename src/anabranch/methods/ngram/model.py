"""A Katz back-off n-gram model over memory-mapped counts: next-token distributions, and the best successors.

    P(w | u v) = d c(u v w) / norm(u v)      where u v w was seen, d being the discount of its count
               = alpha(u v) P(w | v)         elsewhere, and P(w | v) in the same way from P(w)

For a context that was never seen, the shorter context's distribution is used. ``counts`` writes the arrays; whatever
their content, lookups return only tokens of the vocabulary.

Legend: N contexts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.drafting.tables import OpenTables
from anabranch.errors import FileError
from anabranch.support.jsonfiles import is_number

__all__ = ["NGramModel", "Successor"]

ORDERS = (1, 2, 3)
REMEMBERED = 1 << 15  # contexts whose best successors are kept
FREQUENT = 256  # tokens kept of the unigram distribution
ENOUGH = 4  # a context with this many times the requested successors is not backed off
ARRAYS = {
    **dict.fromkeys(("unigram", "norm2", "alpha2", "norm3", "alpha3"), "<f4"),
    **dict.fromkeys(("tokens2", "counts2", "best2", "tokens3", "counts3"), "<u4"),
    **dict.fromkeys(("starts2", "starts3"), "<i8"),
}

Context = tuple[int, int]
Successor = tuple[int, float, Context]
"""A token, its log probability, and the context behind it."""


class NGramModel:
    """Next-token distributions given the last ``order - 1`` tokens; usable like a draft model.

    tables  opened arrays (``counts.build``)
    order   1, 2 or 3: the length of the n-grams
    """

    def __init__(self, tables: OpenTables, order: int = 3) -> None:
        assert order in ORDERS, "an order of the table"
        self.order, self.vocab_size = order, tables.vocab_size
        self._t = _checked(tables)
        self._fall = _discounts(tables)
        best = np.argsort(-self._t["unigram"], kind="stable")[:FREQUENT]
        base = np.asarray(self._t["unigram"], np.float64)
        self._base = [(int(w), float(base[w])) for w in best if base[w] > 0]
        self.best = lru_cache(maxsize=REMEMBERED)(self._best)

    def context(self, tokens: Sequence[int]) -> Context:
        """The last two tokens of a text, -1 where there are none."""
        return (tokens[-2] if len(tokens) > 1 else -1, tokens[-1] if tokens else -1)

    def probs(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Next-token distributions [N, V], float32, each of a text of any length."""
        return torch.from_numpy(np.stack([self._row(*self.context(tokens)) for tokens in contexts]))

    def _row(self, u: int, v: int) -> NDArray[np.float32]:
        row = np.array(self._t["unigram"], np.float64)
        for lower in (False, True)[: self.order - 1]:
            seen = self._seen3(u, v) if lower else self._seen2(v)
            if seen is not None:
                tokens, probs, alpha = seen
                row *= alpha
                row[tokens] = probs
        total = row.sum()
        if not (np.isfinite(total) and total > 0):
            return np.full(self.vocab_size, 1 / self.vocab_size, np.float32)
        shares: NDArray[np.float32] = (row / total).astype(np.float32)
        return shares

    def _best(self, context: Context, count: int) -> tuple[Successor, ...]:
        """The most probable successors of a context, at most ``count``, most probable first.

        A context with many successors of its own is not backed off.
        """
        u, v = context
        prob_of: dict[int, float] = {}
        weight = 1.0
        for order in range(self.order, 1, -1):
            seen = self._seen3(u, v, count) if order == 3 else self._seen2(v, count)
            if seen is None:
                continue
            tokens, probs, alpha = seen
            for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True):
                prob_of.setdefault(token, weight * prob)
            weight *= alpha
            if len(tokens) >= ENOUGH * count:
                break
        else:
            for token, prob in self._base[: ENOUGH * count]:
                prob_of.setdefault(token, weight * prob)
        order_of = sorted(((p, -w) for w, p in prob_of.items() if 0.0 < p < math.inf), reverse=True)[:count]
        return tuple((-w, min(0.0, math.log(p)), (v, -w)) for p, w in order_of)

    def _seen2(self, v: int, count: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float64], float] | None:
        """The tokens seen after v, their probabilities, and the back-off weight; None if v was never seen.

        count  only the ``ENOUGH * count`` most frequent ones; 0: all
        """
        if v < 0:
            return None
        first, last = self._range2(v)
        if first >= last:
            return None
        places = slice(first, last)
        if count and last - first > ENOUGH * count:
            offsets = np.asarray(self._t["best2"][first : first + ENOUGH * count], np.int64)
            return self._level(2, np.minimum(first + offsets, last - 1), v)
        return self._level(2, places, v)

    def _seen3(self, u: int, v: int, count: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float64], float] | None:
        """Best words after u v."""
        if u < 0 or v < 0:
            return None
        first, last = self._range2(u)
        place = first + int(np.searchsorted(self._t["tokens2"][first:last], v))
        if place >= last or int(self._t["tokens2"][place]) != v:
            return None
        starts, size = self._t["starts3"], len(self._t["tokens3"])
        first, last = (min(max(int(starts[place + i]), 0), size) for i in (0, 1))
        if first >= last:
            return None
        return self._level(3, slice(first, min(last, first + ENOUGH * count) if count else last), place)

    def _range2(self, v: int) -> tuple[int, int]:
        starts, size = self._t["starts2"], len(self._t["tokens2"])
        first, last = (min(max(int(starts[v + i]), 0), size) for i in (0, 1))
        return first, last

    def _level(
        self, order: int, places: slice | NDArray[np.int64], context: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        t = self._t
        tokens = np.asarray(t[f"tokens{order}"][places], np.int64)
        counts = np.asarray(t[f"counts{order}"][places], np.int64)
        norm, alpha = float(t[f"norm{order}"][context]), float(t[f"alpha{order}"][context])
        fall = self._fall[order - 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            probs = counts * fall[np.minimum(counts, len(fall) - 1)] / norm
        inside = tokens < self.vocab_size
        return tokens[inside], probs[inside], alpha


def _checked(tables: OpenTables) -> dict[str, NDArray[Any]]:
    """The arrays, of the types and lengths that belong together. Raises FileError."""
    arrays, size = tables.arrays, tables.vocab_size
    if {name: arrays[name].dtype.str for name in arrays} != ARRAYS:
        raise FileError("the tables lack an array of an n-gram model, or have one of another type; build them again")
    n2, n3 = len(arrays["tokens2"]), len(arrays["tokens3"])
    wanted = {"unigram": size, "starts2": size + 1, "norm2": size, "alpha2": size, "starts3": n2 + 1, "counts3": n3}
    wanted |= dict.fromkeys(("counts2", "best2", "norm3", "alpha3"), n2)
    for name, length in wanted.items():
        if len(arrays[name]) != length:
            raise FileError(
                f"the array {name!r} of the n-gram model has {len(arrays[name]):,} entries where {length:,} belong; "
                "build the tables again"
            )
    return arrays


def _discounts(tables: OpenTables) -> list[NDArray[np.float64]]:
    stated = tables.facts.get("discounts")
    each = [stated.get(str(n)) if isinstance(stated, dict) else None for n in (2, 3)]
    for factors in each:
        if not isinstance(factors, list) or len(factors) < 2 or not all(is_number(f, 0, 1) for f in factors):
            raise FileError("the tables of the n-gram model state no discounts from 0 to 1; build them again")
    return [np.array(factors, np.float64) for factors in each]
