"""What a step computes at fixed shapes, recorded once and repeated: CUDA graphs.

A GPU takes the operations of a pass over a few tokens faster than Python can name them. A CUDA graph names them once
and repeats the same operations on the same memory. So whatever changes from step to step must lie in tensors at fixed
places, and shapes must come from a short list: trees are padded to ``width_bucket``, what is read of a cache to
``span_bucket``. Nothing that is recorded may bring a number back to the host.

    compute(*inputs) -> outputs      reads and writes tensors only (a cache besides its inputs)
    Graphs.run(key, ...)             as it stands the first time; recorded the second; repeated from then on

A one-off call is thus never recorded. Where recording fails, or what is repeated differs from what was computed, a
warning says so and all goes on unrecorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["CudaRecorder", "Graphs", "Recorder", "recorder_for", "span_bucket", "width_bucket"]

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # nodes a row
ROWS = 1024  # nodes of all rows; beyond, products take longer than naming operations does
SPAN = 256  # positions, and their multiples
KEPT = 64  # recordings of one cache
TOLERANCE = 2e-2  # of the largest value: a recording may use another product kernel, but no other inputs

Outputs: TypeAlias = "tuple[Tensor, ...]"
Compute: TypeAlias = "Callable[..., Outputs]"
Recorder: TypeAlias = "Callable[[Compute, tuple[Tensor, ...]], tuple[Callable[[], None], Outputs]]"
"""Records ``compute`` over inputs at fixed places: what repeats it, and where its outputs then lie."""


def width_bucket(nodes: int, rows: int) -> int | None:
    """The width that trees of ``nodes`` nodes are padded to; None if they are too wide to be recorded."""
    width = next((width for width in WIDTHS if width >= nodes), None)
    return None if width is None or width * rows > ROWS else width


def span_bucket(span: int, capacity: int) -> int:
    """How many positions of a cache are read where ``span`` are in use: at most a quarter more, or SPAN."""
    step = max(SPAN, 1 << max(span.bit_length() - 3, 0))
    return min(-(-span // step) * step, capacity)


def recorder_for(device: torch.device) -> Recorder | None:
    """How steps are recorded on ``device``; None where there is nothing to gain."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: outputs last until the next recording runs.

    Its two streams are made once, on its own device: cuBLAS keeps a workspace for each stream that it has seen, and
    PyTorch's own stream for recordings is of the device that recorded first. A workspace goes with a graph of its
    stream, and the pool with its last graph; so the first graph stays.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._aside, self._recording = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._first: torch.cuda.CUDAGraph | None = None

    def __deepcopy__(self, memo: object) -> CudaRecorder:
        return CudaRecorder(self.device)

    def __call__(self, compute: Compute, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], None], Outputs]:
        """A ``Recorder``."""
        with torch.cuda.device(self.device):  # graphs are made where the current device is
            here = torch.cuda.current_stream()
            self._aside.wait_stream(here)
            with torch.cuda.stream(self._aside):
                compute(*inputs)  # kernels are loaded and workspaces made before anything is recorded
            here.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self._recording):
                    outputs = compute(*inputs)
            finally:
                torch.cuda.set_stream(here)  # where recording fails, PyTorch leaves its own
        self._first = self._first or graph
        return graph.replay, outputs


@dataclass(frozen=True)
class _Graph:
    """A recording. ``held`` is what it reads besides its inputs and is not to go before it does."""

    inputs: tuple[Tensor, ...]
    repeat: Callable[[], None]
    outputs: Outputs
    held: tuple[object, ...]


class Graphs:
    """The recordings over one cache or of one drafter; they end with their owner."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Graph | None] = {}  # None: computed once, not recorded
        self._failed = False

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return sum(graph is not None for graph in self._kept.values())

    def run(
        self,
        recorder: Recorder | None,
        key: Hashable,
        compute: Compute,
        inputs: Sequence[Tensor],
        device: torch.device,
        *,
        held: tuple[object, ...] = (),
    ) -> Outputs:
        """``compute(*inputs)``; ``inputs`` may lie on the host.

        ``key`` names all that decides which operations these are, shapes included. Outputs are overwritten by the next
        recording that runs: copy what is to stay.
        """
        if recorder is None or self._failed or not torch.is_inference_mode_enabled():
            return compute(*(x.to(device, non_blocking=True) for x in inputs))
        known = key in self._kept
        graph = self._kept.pop(key, None)
        if graph is None:
            placed = tuple(x.to(device, copy=True, non_blocking=True) for x in inputs)
            outputs = compute(*placed)
            if known:
                graph = self._record(recorder, compute, placed, outputs, held)
        else:
            for place, x in zip(graph.inputs, inputs, strict=True):
                place.copy_(x, non_blocking=True)  # the host's values are taken before the call returns
            graph.repeat()
            outputs = graph.outputs
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]  # the one that was not used for longest
        self._kept[key] = graph
        return outputs

    def _record(
        self, recorder: Recorder, compute: Compute, inputs: Outputs, expected: Outputs, held: tuple[object, ...]
    ) -> _Graph | None:
        try:
            repeat, outputs = recorder(compute, inputs)
            for output in outputs:
                output.zero_()  # so that a recording of nothing is seen to be one
            repeat()
            wrong = any(_differ(found, wanted) for found, wanted in zip(outputs, expected, strict=True))
            why = "what is repeated differs from what was computed" if wrong else ""
        except (RuntimeError, torch.OutOfMemoryError) as error:
            why = str(error).split("\n")[0]
        if not why:
            return _Graph(inputs, repeat, outputs, held)
        self._failed = True
        warnings.warn(f"steps cannot be recorded here, so they take longer; tokens stay the same: {why}", stacklevel=3)
        return None


def _differ(found: Tensor, wanted: Tensor) -> bool:
    if not found.is_floating_point():
        return False  # choices among equals may fall otherwise
    largest = float(wanted.float().nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return not torch.allclose(found.float(), wanted.float(), rtol=0.0, atol=TOLERANCE * largest)
