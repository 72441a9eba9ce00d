"""Small cases of every fused operation, on which a device's kernels must agree with their definitions.

Kernels are compiled on the machine that runs them, by a Triton of its own. So before a process uses them, they are run
on these cases; where one fails or differs, steps take more kernels and longer.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.model.device import draft_ops  # noqa: F401 - defines operations
from anabranch.model.device.ops import ACTIVATIONS, NORMS, ops

__all__ = ["Case", "cases", "difference"]


@dataclass(frozen=True)
class Case:
    """A call of an operation; ``written`` are the arguments that it changes, which are compared like results."""

    name: str
    arguments: tuple[Any, ...]
    written: tuple[int, ...] = ()


def difference(case: Case, kernels: Mapping[str, Any], device: torch.device) -> str:
    """The difference of a kernel's result from the operation's on the host, or its error; empty: at most rounding."""
    try:
        return _difference(case, kernels, device)
    except Exception as error:  # Triton's compiler and CUDA's driver raise errors of any class
        return f"{type(error).__name__}: {error}"


def _difference(case: Case, kernels: Mapping[str, Any], device: torch.device) -> str:
    both = []
    for compute, where in ((getattr(ops, case.name), torch.device("cpu")), (kernels[case.name], device)):
        arguments = tuple(_placed(x, where) for x in case.arguments)
        results = compute(*arguments)
        results = results if isinstance(results, tuple) else () if results is None else (results,)
        both.append([x.cpu() for x in (*results, *(arguments[place] for place in case.written))])
    for wanted, got in zip(*both, strict=True):
        if wanted.shape != got.shape or wanted.dtype != got.dtype:
            return f"{case.name}: {tuple(got.shape)} {got.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        if not wanted.is_floating_point():
            if not torch.equal(wanted, got):
                return f"{case.name}: other integers"
            continue
        most = 1e-4 if wanted.dtype == torch.float32 else 3e-2
        wanted, got = wanted.float(), got.float()
        apart = float((wanted - got).abs().where(wanted != got, 0.0).max())  # infinities may be equal
        apart /= max(1.0, float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        if not apart <= most:
            return f"{case.name}: off by {apart:.1e} of the largest value"
    return ""


def _placed(x: Any, device: torch.device) -> Any:
    """A copy on a device, with the strides of a view of a cache."""
    if not isinstance(x, Tensor):
        return x
    placed = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return placed.copy_(x)


def cases(dtype: torch.dtype, *, long: int = 300, every: int = 1) -> Iterator[Case]:
    """Every operation, with the shapes and options that families differ in.

    long   positions of the longest cache
    every  of each operation, the first case and then one in so many
    """
    seen = Counter[str]()
    for case in _cases(dtype, long):
        if seen[case.name] % every == 0:
            yield case
        seen[case.name] += 1


def _cases(dtype: torch.dtype, long: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    yield from _products(some)
    yield from _heads(some)
    yield from _attention(some, long)
    yield from _drafts(some)
    for rows, vocabulary in ((1, 19), (3, 5000)):
        logits = some(rows, vocabulary)
        logits[0, vocabulary // 3] = logits[0, vocabulary // 2] = 9.0
        if rows > 1:
            logits[1, 7], logits[2, 11] = float("nan"), float("inf")
        yield Case("choose", (logits,))
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5, -1], [-1, 0, 1, 2, 3, 4, 5, 6], [-1, -1, -1, -1, -1, -1, -1, -1]])
    lengths = torch.tensor([5, 0, 9])
    yield Case("ancestry", (parents, lengths))
    yield Case("ancestry", (torch.arange(-1, 39)[None].contiguous(), lengths[:1]))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6, 7, 8], [1, 0, 0, 0, 0, 0, 0, 0]])
    chosen = torch.tensor([[3, 9, 6, 9, 9, 7, 8, 9], [2, 3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, 0, 0, 0, 0, 0]])
    verdicts = ops.verify(tokens, parents, chosen)
    yield Case("verify", (tokens, parents, chosen))
    keys, values = some(2, 4, 2, 24, 8)[:, :3], some(2, 4, 2, 24, 8)[:, :3]
    yield Case("keep", (keys, values, lengths, verdicts), written=(0, 1))


def _drafts(some: Any) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    b, f, s, d, z, v, x, k = 2, 3, 4, 40, 16, 50, 8, 5
    embedding, states, tokens = some(v + 9, d), some(b, s, d), torch.arange(b * f).view(b, f)
    carried, parents = some(b * 2, z), torch.tensor([[0, 1, 1], [1, 0, 0]])
    for path, above in ((True, carried), (True, None), (False, None)):
        yield Case("condition", (embedding, tokens, states, 1, path, above, parents + 7, 7, z))
    ids, counts = torch.randint(v + 9, (b, x), generator=generator), torch.tensor([0, 5])
    hidden = some(b * f, d)
    yield Case("own_scores", (hidden, embedding, ids, counts))
    scores = some(b * f, v)
    scores[2, 3] = float("inf")
    yield Case("best", (scores, ops.own_scores(hidden, embedding, ids, counts), torch.arange(v) + 9, ids, k))
    table = torch.zeros(b, 24, dtype=torch.int64), torch.randn(b, 24, generator=generator), torch.arange(48).view(b, 24)
    children = torch.randn(b * f, k, generator=generator), torch.arange(b * f * k).view(b * f, k)
    yield Case("level", (*children, f, 2, 10, 12, *table), written=(6, 7, 8))
    yield Case("level", (*(part[:b].clone() for part in children), 1, -1, 0, 5, *table), written=(6, 7, 8))
    joint = torch.tensor([[-1.0, -1.0, -3.0, -2.0, -2.0, -9.0], [-0.5, -1.0, -1.5, -5.0, -9.0, float("-inf")]])
    of = torch.tensor([[-1, -1, -1, 0, 1, 3], [-1, -1, -1, 0, 0, 1]])
    for nodes, floor in ((5, -math.inf), (7, -6.0), (7, -math.inf)):
        arguments = (torch.arange(12).view(b, 6), joint, of, torch.tensor([7, 8]), torch.tensor([30, 40]))
        yield Case("select", (*arguments, nodes, 8, floor))


def _products(some: Any) -> Iterator[Case]:
    for m, d, outputs in ((1, 40, 24), (5, 1024, 72), (20, 96, 40)):
        x, norm_weight, norm_bias = some(m, d), some(d), some(d)
        for norm in range(len(NORMS)):
            weight, bias = some(outputs, d) * d**-0.5, some(outputs) if norm % 2 else None
            norms = (norm_weight if norm else None, norm_bias if NORMS[norm] == "layer" else None, norm, 1e-5)
            yield Case("product", (x, weight, bias, *norms, 0, 0, some(m, outputs) if norm > 1 else None))
        for activation in range(1, len(ACTIVATIONS)):
            for gated, rest in ((0, 0), (outputs, 0), (outputs, 6)):
                weight = some((2 * gated + rest) or outputs, d) * d**-0.5
                bias = some(len(weight)) if activation == 1 else None
                yield Case("product", (x, weight, bias, norm_weight, None, 1, 1e-5, activation, gated, None))


def _heads(some: Any) -> Iterator[Case]:
    h, kv = 4, 2
    shapes = ((8, 8), (16, 16), (24, 8), (16, 0))  # width of a head, of these rotated channels
    for (e, dim), (b, r), d in zip(shapes, ((1, 1), (2, 5), (1, 20), (3, 2)), (512, 40, 64, 48), strict=True):
        for head_norm in (0, 1, 2):
            weight, capacity = some((h + 2 * kv) * e, d) * d**-0.5, 40
            angles = torch.arange(64)[:, None] * torch.linspace(1, 0.1, max(dim // 2, 1))
            angles = torch.cat((angles, angles), dim=-1)
            positions = torch.arange(b * r).view(b, r) + 3
            norms = (some(e), some(e)) if head_norm else (None, None)
            held = (some(b, kv, capacity, e), some(b, kv, capacity, e))
            yield Case(
                "heads",
                (
                    *(some(b, r, d), weight, some(len(weight)) if head_norm == 1 else None, some(d), None, 1, 1e-5),
                    *(*norms, head_norm, torch.stack((angles.cos(), angles.sin())) if dim else None, positions),
                    *(*held, positions % capacity),
                ),
                written=(12, 13),
            )


def _attention(some: Any, long: int) -> Iterator[Case]:
    for (b, n, h, kv, e), streams, window, cap in itertools.product(
        ((1, 1, 4, 2, 8), (2, 8, 4, 1, 16), (3, 5, 2, 2, 24)), (0, 3), (0, 7), (0.0, 4.0)
    ):
        parents = torch.tensor([[max(node - 1 - node % 2, -1) for node in range(n)]] * b)
        lengths = torch.tensor([long - n - 8 * row for row in range(b)])
        positions, tree = ops.ancestry(parents, lengths)
        r = n * max(streams, 1)
        keys, values = some(b, kv, long + 4, e)[:, :, :long], some(b, kv, long + 4, e)[:, :, :long]
        own = (some(b, kv, r, e), some(b, kv, r, e)) if streams else (None, None)
        trailing = n == 1 and bool(streams)
        where = lengths[:, None] - 1 if trailing else positions
        yield Case(
            "attend",
            (
                *(some(b, r, h, e), keys, values, lengths, None if trailing else tree, where if window else None),
                *(*own, streams, window, e**-0.5, cap),
            ),
        )
