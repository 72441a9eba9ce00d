"""CUDA graphs: computations of fixed shapes, captured once and replayed.

A GPU runs the operations of a pass over a few tokens faster than Python can launch them; a CUDA graph launches all of
them at once, on the same memory. So inputs that change from step to step must lie in tensors at fixed addresses, and
shapes must come from a short list: trees are padded to ``width_bucket``, and ``span_bucket`` positions of a cache are
read. A captured computation must not read values back to the host.

    compute(*inputs) -> outputs      reads and writes tensors only (a cache besides its inputs)
    Graphs.run(key, ...)             computes the first time, captures the second, replays from then on

A call that is never repeated is therefore never captured. If capturing fails, or a replay differs from the eager
result, a warning is issued and everything runs without graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["FUSED", "Capture", "CudaCapture", "Graphs", "capture_for", "span_bucket", "width_bucket"]

WIDEST = 256  # nodes of a row
FUSED = 64  # nodes of all rows that fused layers take: each block of so many reads all weights once more
BLOCK = 8  # several nodes are padded to so many of all rows, which cost 1.2 plain passes on an H200
ROWS = 1024  # nodes of all rows; beyond that, products take longer than launching them
SPAN = 256  # positions of a cache are read in multiples of this
SKIPPED = 4  # where kernels skip what is not in use, spans are SPAN times powers of this
KEPT = 64  # graphs of one cache
TOLERANCE = 2e-2  # of the largest value: a graph may use another product kernel, but not other inputs

Outputs: TypeAlias = "tuple[Tensor, ...]"
Compute: TypeAlias = "Callable[..., Outputs]"
Capture: TypeAlias = "Callable[[Compute, tuple[Tensor, ...]], tuple[Callable[[], None], Outputs]]"
"""Captures ``compute`` over inputs at fixed addresses; returns a function that replays it, and its outputs."""


def width_bucket(nodes: int, rows: int) -> int | None:
    """The width that trees of ``nodes`` nodes are padded to, a power of two; None if they are too wide to capture.

    Shapes are few, since a new one runs eagerly once and is captured the next time. Padding alone takes no pass out of
    the fused layers.
    """
    width = 1 if nodes == 1 else max(1 << (nodes - 1).bit_length(), BLOCK // rows)
    if nodes * rows <= FUSED < width * rows:
        width = FUSED // rows
    return None if width > WIDEST or width * rows > ROWS else width


def span_bucket(span: int, capacity: int, *, skips: bool = False) -> int:
    """The number of cache positions to read when ``span`` are in use: at most a quarter more, or SPAN.

    skips  the kernels skip positions that are not in use, and buckets are wide
    """
    if skips:
        wide = SPAN * SKIPPED
        while wide < span:
            wide *= SKIPPED
        return min(wide, capacity)
    step = max(SPAN, 1 << max(span.bit_length() - 3, 0))
    return min(-(-span // step) * step, capacity)


def capture_for(device: torch.device) -> Capture | None:
    """The capture for a device; None if it has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None


class CudaCapture:
    """Captures CUDA graphs, which share one pool of memory: outputs are valid until the next graph is replayed.

    Its two CUDA streams are made once, on its own device: cuBLAS keeps a workspace for each stream that it has seen,
    and PyTorch's default stream for captures belongs to the device that captured first. A workspace is freed with a
    graph of its stream, and the pool with its last graph; so the first graph is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._aside, self._capturing = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._first: torch.cuda.CUDAGraph | None = None

    def __deepcopy__(self, memo: object) -> CudaCapture:
        return CudaCapture(self.device)

    def __call__(self, compute: Compute, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], None], Outputs]:
        """See ``Capture``."""
        with torch.cuda.device(self.device):  # graphs are made on the current device
            here = torch.cuda.current_stream()
            self._aside.wait_stream(here)
            with torch.cuda.stream(self._aside):
                compute(*inputs)  # kernels are loaded and workspaces made before the capture
            here.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self._capturing):
                    outputs = compute(*inputs)
            finally:
                torch.cuda.set_stream(here)  # where capturing fails, PyTorch leaves its own
        self._first = self._first or graph
        return graph.replay, outputs


@dataclass(frozen=True)
class _Graph:
    """A captured graph. ``held`` keeps everything else alive that it reads."""

    inputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    outputs: Outputs
    held: tuple[object, ...]


class Graphs:
    """The graphs over one cache or of one drafter, freed with their owner."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Graph | None] = {}  # None: computed once, not yet captured
        self._failed = False

    @property
    def captured(self) -> int:
        """The number of captured graphs."""
        return sum(graph is not None for graph in self._kept.values())

    def run(
        self,
        capture: Capture | None,
        key: Hashable,
        compute: Compute,
        inputs: Sequence[Tensor],
        device: torch.device,
        *,
        held: tuple[object, ...] = (),
    ) -> Outputs:
        """``compute(*inputs)``; ``inputs`` may lie on the host.

        ``key`` must determine which operations these are, shapes included. Outputs are overwritten by the next graph
        that is replayed: copy what must last.
        """
        if capture is None or self._failed or not torch.is_inference_mode_enabled():
            return compute(*(x.to(device, non_blocking=True) for x in inputs))
        known = key in self._kept
        graph = self._kept.pop(key, None)
        if graph is None:
            placed = tuple(x.to(device, copy=True, non_blocking=True) for x in inputs)
            outputs = compute(*placed)
            if known:
                graph = self._capture(capture, compute, placed, outputs, held)
        else:
            for place, x in zip(graph.inputs, inputs, strict=True):
                place.copy_(x, non_blocking=True)  # the host's values are read before the call returns
            graph.replay()
            outputs = graph.outputs
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]  # the least recently used one
        self._kept[key] = graph
        return outputs

    def _capture(
        self, capture: Capture, compute: Compute, inputs: Outputs, expected: Outputs, held: tuple[object, ...]
    ) -> _Graph | None:
        try:
            replay, outputs = capture(compute, inputs)
            for output in outputs:
                output.zero_()  # so that a graph that does nothing is noticed
            replay()
            wrong = any(_differ(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
            why = "a replay differs from what was computed" if wrong else ""
        except (RuntimeError, torch.OutOfMemoryError) as error:
            why = str(error).split("\n")[0]
        if not why:
            return _Graph(inputs, replay, outputs, held)
        self._failed = True
        warnings.warn(f"CUDA graphs are off, so steps take longer; tokens stay the same: {why}", stacklevel=3)
        return None


def _differ(output: Tensor, wanted: Tensor) -> bool:
    if not output.is_floating_point():
        return False  # choices among equals may differ
    largest = float(wanted.float().nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return not torch.allclose(output.float(), wanted.float(), rtol=0.0, atol=TOLERANCE * largest)
