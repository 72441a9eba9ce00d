"""The key/value cache: preallocated, one length a row, trees appended behind it and committed or dropped.

Shapes: B rows in use, K kv heads, C capacity, E head width, N tree nodes, P path.

    lengths[b] committed tokens | tree nodes of this step | free
    append   writes the tree's keys and values behind the committed tokens, layer by layer
    select   from this layer on the tree has only the kept nodes (early-exit pruning, drawn lazily: ACL G.1)
    commit   moves the accepted path's rows to the front of the tree's place and advances the length
    rewind   forgets the newest tokens of a row
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import DeviceError, InputError
from anabranch.model.config import ModelConfig
from anabranch.model.graphs import Graphs
from anabranch.native import library as native

__all__ = ["Cache"]


class Cache:
    """Keys and values of ``rows`` sequences of up to ``capacity`` tokens each.

    ``keys`` and ``values`` are [layers, rows, K, C, E]. Rows 0..count-1 are in use; a row that leaves is
    replaced by the last one, so that the rows in use stay together and a step reads one slice. ``kernels`` move what is
    committed, where they are given.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: native.Library | None = None,
    ) -> None:
        shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
        try:
            self.keys, self.values = (_zeros(shape, dtype, device, kernels) for _ in range(2))
        except (RuntimeError, DeviceError) as error:  # torch's, also on a GPU; the kernels'
            gib = 2 * torch.Size(shape).numel() * dtype.itemsize / 2**30
            raise DeviceError(
                f"the cache for {rows} row(s) of {capacity} tokens needs {gib:.1f} GiB on {device}, more than is free; "
                "use fewer rows, a shorter prompt or a smaller max_new_tokens"
            ) from error
        self.config, self.rows = config, rows
        self.capacity = capacity
        self.graphs = Graphs()  # of what reads and writes these rows
        self._kernels = kernels
        self.lengths: list[int] = []
        self._width = 0
        self._selections: list[tuple[int, Tensor]] = []

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    @property
    def span(self) -> int:
        """Positions that the widest row takes, this step's tree included."""
        return max(self.lengths) + self._width

    # -- rows join and leave ---------------------------------------------------------------------
    def add_row(self) -> int:
        """Take the next free row; returns its slot."""
        if self.count >= self.rows:
            raise InputError(f"all {self.rows} rows of the cache are in use; wait for one to finish or allocate more")
        self.lengths.append(0)
        return self.count - 1

    def remove_row(self, slot: int) -> int:
        """Free ``slot``; returns the slot whose row moved into it (the last one), or ``slot`` if none moved."""
        last = self.count - 1
        if slot != last:
            n = self.lengths[last]
            self.keys[:, slot, :, :n] = self.keys[:, last, :, :n]
            self.values[:, slot, :, :n] = self.values[:, last, :, :n]
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()
        return last

    def move_row(self, source: int, slot: int) -> None:
        """Copy what ``source`` holds into ``slot``, which is overwritten."""
        self.fork(source, slot, self.lengths[source])
        self.lengths[slot] = self.lengths[source]

    def fork(self, source: int, slot: int, length: int) -> None:
        """Copy the first ``length`` tokens that lie in ``source`` to ``slot``; neither need be in use.

        Whoever takes ``slot`` into use sets its length.
        """
        if source != slot:
            self.keys[:, slot, :, :length] = self.keys[:, source, :, :length]
            self.values[:, slot, :, :length] = self.values[:, source, :, :length]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.keys.element_size() * self.keys.shape[0] * self.keys.shape[2] * self.keys.shape[4]

    def taken(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first ``length`` tokens' keys and values in a slot [layers, K, length, E]."""
        return self.keys[:, slot, :, :length].clone(), self.values[:, slot, :, :length].clone()

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values as ``taken`` returns them to the beginning of a slot."""
        self.keys[:, slot, :, : keys.shape[2]], self.values[:, slot, :, : keys.shape[2]] = keys, values

    def resized(self, rows: int, capacity: int) -> Cache:
        """A cache of another size with the rows that are in use, and what lies in the slots that both have.

        Raises DeviceError where memory does not suffice; this cache stays as it is.
        """
        made = Cache(
            self.config,
            rows=rows,
            capacity=capacity,
            dtype=self.keys.dtype,
            device=self.keys.device,
            kernels=self._kernels,
        )
        slots, span = min(rows, self.rows), min(capacity, self.capacity)
        assert self.count <= rows
        made.keys[:, :slots, :, :span] = self.keys[:, :slots, :, :span]
        made.values[:, :slots, :, :span] = self.values[:, :slots, :, :span]
        made.lengths = list(self.lengths)
        return made

    # -- one step ---------------------------------------------------------------------------------
    def begin(self, width: int, slots: slice) -> None:
        """Announce a step of ``width`` nodes for the rows of ``slots``; refuses what does not fit."""
        longest = max(self.lengths[slots])
        if longest + width > self.capacity:
            raise InputError(
                f"{longest} tokens and {width} draft nodes do not fit a cache of {self.capacity} tokens; "
                "shorten the prompt, lower max_new_tokens or use a smaller tree"
            )
        self._slots = slots
        self._width = width
        self._selections = []
        self._places: tuple[Tensor, Tensor] | None = None

    def place(self, index_BN: Tensor) -> None:
        """Where this step's nodes are to be written, told by a tensor: what is recorded must not know the lengths."""
        slots = self._slots
        self._places = torch.arange(slots.start, slots.stop, device=index_BN.device)[:, None], index_BN

    def append(self, layer: int, k_BNKE: Tensor, v_BNKE: Tensor) -> None:
        """Write this step's keys and values of one layer behind each row's committed tokens."""
        n = k_BNKE.shape[1]
        slots = self._slots
        if slots.stop - slots.start == 1 and self._places is None:
            start = self.lengths[slots.start]
            self.keys[layer, slots.start, :, start : start + n] = k_BNKE[0].transpose(0, 1)
            self.values[layer, slots.start, :, start : start + n] = v_BNKE[0].transpose(0, 1)
        else:
            if self._places is None:
                device = self.keys.device
                starts = torch.tensor(self.lengths[slots], device=device)
                self.place(starts[:, None] + torch.arange(self._width, device=device))
            assert self._places is not None
            rows_B1, index_BN = self._places
            self.keys[layer][rows_B1, :, index_BN[:, :n]] = k_BNKE
            self.values[layer][rows_B1, :, index_BN[:, :n]] = v_BNKE

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, span, E] of the rows of this step, committed tokens first."""
        return self.keys[layer, self._slots, :, :span], self.values[layer, self._slots, :, :span]

    def select(self, layer: int, kept_Bn: Tensor) -> None:
        """From ``layer`` on this step's tree consists of the nodes ``kept_Bn`` (indices into the nodes so far)."""
        self._selections.append((layer, kept_Bn.cpu()))
        self._width = kept_Bn.shape[1]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of each row's accepted path (node indices of the final, selected tree); drop the rest.

        Rows of pruned nodes below the pruning layer are dropped here, lazily (ACL G.1).
        """
        layers = self.keys.shape[0]
        bounds = [0, *(layer for layer, _ in self._selections), layers]
        for b, path in enumerate(paths):
            slot = self._slots.start + b
            start = self.lengths[slot]
            nodes = list(path)
            # walk the groups of layers from the top, translating node indices back through each selection
            for group in range(len(bounds) - 2, -1, -1):
                low, high = bounds[group], bounds[group + 1]
                if high > low and nodes != list(range(len(nodes))):
                    self._move(low, high, slot, start, nodes)
                if group > 0:
                    kept = self._selections[group - 1][1][b].tolist()
                    nodes = [kept[node] for node in nodes]
            self.lengths[slot] = start + len(path)
        self._width = 0
        self._selections = []

    def _move(self, low: int, high: int, slot: int, start: int, nodes: list[int]) -> None:
        """What lies at start + nodes[i] goes to start + i, in some layers."""
        if self._kernels is not None:
            self._kernels.move(self.keys, self.values, range(low, high), slot, start, np.asarray(nodes, np.int64))
            return
        moved = slice(start, start + len(nodes))
        index = torch.tensor(nodes, device=self.keys.device) + start
        self.keys[low:high, slot, :, moved] = self.keys[low:high, slot, :, index]
        self.values[low:high, slot, :, moved] = self.values[low:high, slot, :, index]

    def rewind(self, slot: int, length: int) -> None:
        """Forget all tokens of a row after the first ``length``."""
        assert 0 <= length <= self.lengths[slot]
        self.lengths[slot] = length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kernels: native.Library | None) -> Tensor:
    """Zeros, not garbage: a masked position still enters 0 * value, and garbage may be NaN."""
    size = math.prod(shape) * dtype.itemsize
    if kernels is None or size < native.PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    # a step touches every layer's part of a row; they lie on as many pages, unless those are large
    return kernels.large(size).view(dtype).view(shape).zero_()
