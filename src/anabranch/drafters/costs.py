"""What a step costs by the nodes that it verifies.

``anabranch tune`` measures whole steps. Before it has, ``usual_costs`` times passes of a few widths, which takes a
moment: how much arithmetic hides behind reading the weights differs between processors of one kind, and with what their
neighbours do.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.errors import InputError
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder, Feed

__all__ = ["StepCosts", "pass_costs", "usual_costs"]

ROWS = (1, 3, 6, 8, 12, 16, 24)
ENOUGH = 2.0  # a pass that takes that many times what one over one row takes is the widest that is tried
SECONDS = 0.15  # in which rounds begin
# what drafting and the streams that trail take, in passes over one row, by what weights are (benchmarks/, "What
# speculation did"): what only drafts read is as large for all of them
DRAFT = {"float32": 0.2, "bfloat16": 0.3, "int8": 0.5, "int4": 0.7}
UNPACKED = 0.6  # the same in PyTorch

_measured: WeakKeyDictionary[Decoder, StepCosts] = WeakKeyDictionary()


@dataclass(frozen=True)
class StepCosts:
    """What a whole step costs by the width of its tree, in milliseconds or any other unit; widths ascend.

    Between two widths it is linear, beyond the last as steep as from the first to the last: it may be a staircase.
    """

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> StepCosts:
        """From ``"1:8.7/8:9.4/16:11.2"``, nodes and milliseconds. Raises InputError."""
        try:
            pairs = [item.split(":") for item in text.split("/")]
            table = sorted((int(width), float(ms)) for width, ms in pairs)
        except ValueError as error:
            raise InputError(f"step costs are given as NODES:MS/NODES:MS, as in 1:8.7/16:11.2, not {text!r}") from error
        widths, costs = zip(*table, strict=True)
        if widths[0] < 1 or len(set(widths)) < len(widths) or not all(0 < ms < math.inf for ms in costs):
            raise InputError(f"step costs have positive milliseconds for different numbers of nodes, unlike {text!r}")
        return StepCosts(widths, costs)

    def __str__(self) -> str:
        """What ``parse`` reads."""
        return "/".join(f"{width}:{ms:.4g}" for width, ms in zip(self.widths, self.ms, strict=True))

    def __call__(self, widths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Costs of these widths, of the same shape."""
        inside = np.interp(widths, self.widths, self.ms)
        if len(self.widths) == 1:
            return inside
        steep = max(0.0, (self.ms[-1] - self.ms[0]) / (self.widths[-1] - self.widths[0]))
        beyond: NDArray[np.float64] = inside + steep * np.maximum(0, widths - self.widths[-1])
        return beyond


def pass_costs(target: Decoder) -> StepCosts:
    """Milliseconds of a pass over 1 to at most 24 rows behind an empty cache, the least of rounds in turns.

    Measured when it is first asked for. Not on a GPU, where shapes would be recorded: there a row is taken to cost
    1/128 of a pass.
    """
    if target.device.type != "cpu":
        return StepCosts((1, 129), (1.0, 2.0))
    if target not in _measured:
        _measured[target] = _measure(target)
    return _measured[target]


@torch.inference_mode()
def _measure(target: Decoder) -> StepCosts:
    kernels = None if target.stack is None else target.stack.kernels
    widest = min(ROWS[-1], target.config.max_positions)
    cache = Cache(target.config, rows=1, capacity=widest, dtype=target.dtype, device=target.device, kernels=kernels)
    cache.add_row()
    least: dict[int, float] = {}

    def once(rows: int) -> float:
        feed = Feed.of_prompt([0] * rows)
        began = time.perf_counter()
        target(feed, cache, planned=widest, need="tokens")
        ms = 1e3 * (time.perf_counter() - began)
        cache.commit([[]])
        return ms

    with target.decoding():
        tried = [rows for rows in ROWS if rows <= widest]
        for rows in tried if kernels is None else tried[:1]:
            once(rows)  # memory is touched for the first time, and PyTorch prepares itself for each shape
        began = time.perf_counter()
        while not least or time.perf_counter() - began < SECONDS:
            for place, rows in enumerate(tried):
                least[rows] = min(least.get(rows, math.inf), once(rows))
                if least[rows] > ENOUGH * least[1]:
                    tried = tried[: place + 1]
                    break
    known = [rows for rows in ROWS if rows <= tried[-1]]
    # more rows cost no less: what noise says otherwise is levelled
    return StepCosts(tuple(known), tuple(np.maximum.accumulate([least[rows] for rows in known]).tolist()))


def usual_costs(target: Decoder) -> StepCosts:
    """What whole steps with streams are taken to cost before ``anabranch tune`` has measured them here."""
    costs = pass_costs(target)
    if target.device.type != "cpu":
        return costs
    more = costs.ms[0] * (UNPACKED if target.stack is None else DRAFT[target.stack.kind])
    return StepCosts(costs.widths, tuple(ms + more for ms in costs.ms))
