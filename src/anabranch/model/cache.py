"""The KV cache: one length for each row; draft trees are appended, then committed or dropped.

Shapes: B rows in use, K kv heads, C capacity, E head width, N tree nodes, P path.

    lengths[b] committed tokens | tree nodes of this step | free
    append   writes the tree's keys and values after the committed tokens, layer by layer
    select   keeps only some of the tree's nodes from a layer on (early-exit pruning, applied lazily: ACL G.1)
    commit   moves the accepted path's keys and values to the front of the tree and advances the length
    rewind   drops the newest tokens of a row
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import InputError, OutOfMemoryError
from anabranch.model.config import ModelConfig
from anabranch.model.encoder import Memory
from anabranch.model.graphs import Graphs
from anabranch.model.recurrent import States
from anabranch.native import library as native
from anabranch.support.memory import free_memory, zeroed
from anabranch.support.nearest import hint

__all__ = ["KINDS", "Cache", "bytes_per_token", "check_kind", "room_for", "shared_length"]

KINDS = ("auto", "int8")  # of caches: in the type of the weights, or quantised

MIN_CAPACITY = 512
SMALL = 2**24  # bytes; smaller caches are allocated without looking at free memory
GROUP = 32  # channels that share a scale in a quantised cache
HEADROOM = 2**27  # bytes left free for the tensors of passes


def check_kind(kind: str) -> None:
    """Raise InputError for an unknown kind of cache."""
    if kind not in KINDS:
        raise InputError(f"kv must be one of {', '.join(KINDS)}, got {kind!r}{hint(kind, KINDS)}")


def room_for(positions: int) -> int:
    """The capacity of a cache for ``positions``: at most a quarter more, so that growing it rarely copies."""
    step = max(MIN_CAPACITY, (1 << (positions - 1).bit_length()) // 2) // 4
    return max(MIN_CAPACITY, -(-positions // step) * step)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, *, quantized: bool = False) -> int:
    """Bytes of one token's keys and values."""
    width, stored = _stored(config, dtype, quantized=quantized)
    return 2 * stored.itemsize * len(config.kv_layers) * config.num_kv_heads * width


def _stored(config: ModelConfig, dtype: torch.dtype, *, quantized: bool) -> tuple[int, torch.dtype]:
    """The width and the type of a key or value of one head in memory."""
    e = config.head_dim
    return (e + e // GROUP * torch.float32.itemsize, torch.uint8) if quantized else (e, dtype)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class Cache:
    """Keys and values of ``rows`` sequences of up to ``capacity`` tokens each.

    ``keys`` and ``values`` are [layers, rows, K, C, E]. Rows 0 to count - 1 are in use; a row that leaves is replaced
    by the last one, so that the rows in use stay contiguous and a step reads one slice. With ``kernels``, memory is in
    large pages and the kernels move committed keys and values.

    dtype      the type of the keys and values of a pass
    quantized  the kernels store them in int8, for E channels E values and a float32 scale for each 32 of them, and
               ``keys`` and ``values`` are uint8 [layers, rows, K, C, E + E / 8]; ``read`` and ``dequantized`` convert
               them. Nothing else reads a key: the nodes of a pass attend to the stored values of each other too

    Raises OutOfMemoryError if memory does not suffice.
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
        quantized: bool = False,
    ) -> None:
        width, stored = _stored(config, dtype, quantized=quantized)
        shape = (len(config.kv_layers), rows, config.num_kv_heads, capacity, width)
        needed = rows * capacity * bytes_per_token(config, dtype, quantized=quantized)
        short = f"the cache for {rows} row(s) of {capacity:,} tokens needs {needed / 2**30:.2f} GiB on {device}, "
        advice = "use fewer rows, a shorter prompt or a smaller max_new_tokens"
        if device.type == "cpu" and needed > SMALL:  # a GPU's allocator raises an error, Linux ends the process
            free = free_memory()
            if free is not None and needed > free - HEADROOM:
                raise OutOfMemoryError(f"{short}and {max(0, free) / 2**30:.2f} GiB are free; {advice}")
        try:
            self.keys, self.values = (_zeros(shape, stored, device, kernels) for _ in range(2))
        except (RuntimeError, OutOfMemoryError) as error:  # of PyTorch (on a GPU too), of ``zeroed``
            raise OutOfMemoryError(f"{short}more than is free; {advice}") from error
        self.config, self.rows, self.dtype, self.quantized = config, rows, dtype, quantized
        self._at = {layer: index for index, layer in enumerate(config.kv_layers)}
        recurrent = config.recurrent
        self.states = None if recurrent is None else States(config, recurrent, rows, dtype, device)
        self.capacity = capacity
        self.graphs = Graphs()  # of computations that read or write these rows
        self._kernels = kernels
        self.lengths: list[int] = []
        self.prompts: list[int] = []  # the length for which each row's prompt is rotated (``Rope``)
        self.memories: list[Memory | None] = []  # of the rows' sources, which rows may share
        self._width = 0
        self._selections: list[tuple[int, Tensor]] = []

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    # -- rows join and leave ---------------------------------------------------------------------
    def add_row(self, prompt: int = 0, memory: Memory | None = None) -> int:
        """Take the next free row and return its slot. Raises InputError if all are in use.

        prompt  the number of prompt tokens, for rotations that depend on it
        memory  the keys and values of the row's source, in an encoder-decoder model
        """
        if self.count >= self.rows:
            raise InputError(f"all {self.rows} rows of the cache are in use; wait for one to finish or allocate more")
        self.lengths.append(0)
        self.prompts.append(prompt)
        self.memories.append(memory)
        if self.states is not None:
            self.states.clear(self.count - 1)
        return self.count - 1

    def remove_row(self, slot: int) -> int:
        """Free ``slot``; return the slot whose row moved into it (the last one), or ``slot`` if none moved."""
        last = self.count - 1
        if slot != last:
            self.move_row(last, slot)
        for each in (self.lengths, self.prompts, self.memories):
            each.pop()
        return last

    def move_row(self, source: int, slot: int) -> None:
        """Copy the row in ``source`` to ``slot``, which is overwritten."""
        self.fork(source, slot, self.lengths[source])
        rows: tuple[list[Any], ...] = (self.lengths, self.prompts, self.memories)
        for each in rows:
            each[slot] = each[source]

    def fork(self, source: int, slot: int, length: int) -> None:
        """Copy the first ``length`` tokens in ``source`` to ``slot``; both may be unused.

        The caller sets the length of ``slot`` when it starts to use it.
        """
        if source != slot:
            if self.states is not None:
                assert length == self.lengths[source], "a recurrent state is that of the whole text"
                self.states.copy(source, slot)
            self.keys[:, slot, :, :length] = self.keys[:, source, :, :length]
            self.values[:, slot, :, :length] = self.values[:, source, :, :length]

    def swap(self, one: int, other: int) -> None:
        """Let two rows change places; the shorter one is copied twice."""
        if one == other:
            return
        short, long = sorted((one, other), key=self.lengths.__getitem__)
        kept, state = self.taken(short, 0, self.lengths[short]), None if self.states is None else self.states.row(short)
        self.keys[:, short, :, : self.lengths[long]] = self.keys[:, long, :, : self.lengths[long]]
        self.values[:, short, :, : self.lengths[long]] = self.values[:, long, :, : self.lengths[long]]
        self.put(long, 0, *kept)
        if self.states is not None and state is not None:
            self.states.copy(long, short)
            self.states.put(long, state)
        rows: tuple[list[Any], ...] = (self.lengths, self.prompts, self.memories)
        for each in rows:
            each[one], each[other] = each[other], each[one]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return bytes_per_token(self.config, self.dtype, quantized=self.quantized)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.states is None else self.states.nbytes)

    def taken(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of tokens ``start`` to ``end`` - 1 of a slot [layers, K, n, E], as stored."""
        return self.keys[:, slot, :, start:end].clone(), self.values[:, slot, :, start:end].clone()

    def put(self, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values as ``taken`` returns them, from token ``start`` of a slot on."""
        end = start + keys.shape[2]
        self.keys[:, slot, :, start:end], self.values[:, slot, :, start:end] = keys, values

    def resized(self, rows: int, capacity: int, *, kept: Mapping[int, int] | None = None) -> Cache:
        """A cache of another size with the rows in use.

        kept  by free slot, how many tokens of its contents are copied too

        Raises OutOfMemoryError if memory does not suffice; this cache stays as it is.
        """
        same: Any = {"dtype": self.dtype, "device": self.keys.device, "kernels": self._kernels}
        made = Cache(self.config, rows=rows, capacity=capacity, quantized=self.quantized, **same)
        assert self.count <= rows
        spans = dict(enumerate(self.lengths)) | {slot: n for slot, n in (kept or {}).items() if slot < rows}
        for slot, span in spans.items():  # no more: pages that nobody wrote to take no memory
            made.keys[:, slot, :, :span] = self.keys[:, slot, :, :span]
            made.values[:, slot, :, :span] = self.values[:, slot, :, :span]
        if self.states is not None and made.states is not None:
            made.states.take(self.states, min(rows, self.rows))
        made.lengths, made.prompts, made.memories = list(self.lengths), list(self.prompts), list(self.memories)
        return made

    def unread(self, slots: slice) -> list[int]:
        """The prompt length of each row that has prompt tokens to read besides the last one; 0 for other rows."""
        rows = zip(self.lengths[slots], self.prompts[slots], strict=True)
        return [prompt if length < prompt - 1 else 0 for length, prompt in rows]

    # -- one step ---------------------------------------------------------------------------------
    def begin(self, width: int, slots: slice) -> None:
        """Begin a step of ``width`` nodes for the rows in ``slots``. Raises InputError if they do not fit."""
        longest = max(self.lengths[slots])
        if longest + width > self.capacity:
            raise InputError(
                f"{longest} tokens and {width} draft nodes do not fit a cache of {self.capacity} tokens; "
                "shorten the prompt, lower max_new_tokens or use a smaller tree"
            )
        self._slots = slots
        self._width = width
        self._selections = []
        if self.states is not None:
            self.states.begin()
        self._places: tuple[Tensor, Tensor] | None = None

    def place(self, index_BN: Tensor) -> None:
        """Set the positions that this step writes, as a tensor: a captured graph must not depend on ``lengths``."""
        slots = self._slots
        self._places = torch.arange(slots.start, slots.stop, device=index_BN.device)[:, None], index_BN

    def append(self, layer: int, k_BNKE: Tensor, v_BNKE: Tensor) -> None:
        """Write this step's keys and values of one layer after each row's committed tokens."""
        assert not self.quantized, "only the kernels write a quantised cache"
        n, layer = k_BNKE.shape[1], self._at[layer]
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
        """The first ``span`` keys and values [B, K, span, E] of the rows of this step."""
        return self.of_rows(layer, self._slots, span)

    def of_rows(self, layer: int, slots: slice | Tensor, span: int) -> tuple[Tensor, Tensor]:
        """The first ``span`` keys and values [B, K, span, E] of the rows in ``slots``."""
        layer = self._at[layer]
        keys, values = self.keys[layer, slots, :, :span], self.values[layer, slots, :, :span]
        return (self.dequantized(keys), self.dequantized(values)) if self.quantized else (keys, values)

    def dequantized(self, stored: Tensor) -> Tensor:
        """The keys or values [..., E] of uint8 rows [..., E + E / 8] of a quantised cache, as the kernels read them."""
        e = self.config.head_dim
        scales = stored[..., e:].contiguous().view(torch.float32)
        values = stored[..., :e].view(torch.int8).reshape(*scales.shape, GROUP) * scales[..., None]
        return values.flatten(-2).to(self.dtype)

    def select(self, layer: int, kept_Bn: Tensor) -> None:
        """Keep only the nodes ``kept_Bn`` of this step from ``layer`` on (indices into the nodes so far)."""
        self._selections.append((layer, kept_Bn.cpu()))
        self._width = kept_Bn.shape[1]

    def commit(self, paths: Sequence[Sequence[int]], *, moved: bool = False) -> None:
        """Keep the nodes of each row's accepted path (indices into the selected tree) and drop the rest.

        Nodes that were pruned at a layer are dropped from the layers below it here, lazily (ACL G.1). With ``moved``
        the pass has moved keys and values already (``PassResult.verdicts``).
        """
        if self.states is not None:
            self.states.commit(self._slots.start, paths)
        if not self._selections and all(len(path) == 1 and path[0] == 0 for path in paths):
            for slot in range(self._slots.start, self._slots.start + len(paths)):  # roots lie where they belong
                self.lengths[slot] += 1
            paths = ()
        for slot, path in enumerate(paths, self._slots.start):
            high, nodes = self.keys.shape[0], list(range(len(path)) if moved else path)
            # walk the groups of layers from the top, translating node indices back through each selection
            for low, kept_Bn in reversed(self._selections):
                self._move(low, high, slot, self.lengths[slot], nodes)
                kept = kept_Bn[slot - self._slots.start].tolist()
                high, nodes = low, [kept[node] for node in nodes]
            self._move(0, high, slot, self.lengths[slot], nodes)
            self.lengths[slot] += len(path)
        self._width = 0
        self._selections = []

    def _move(self, low: int, high: int, slot: int, start: int, nodes: list[int]) -> None:
        """Move position start + nodes[i] to start + i in layers ``low`` to ``high`` - 1."""
        if low == high or nodes == list(range(len(nodes))):
            return
        if self._kernels is not None:
            self._kernels.move(self.keys, self.values, range(low, high), slot, start, np.asarray(nodes, np.int64))
            return
        moved = slice(start, start + len(nodes))
        index = torch.tensor(nodes, device=self.keys.device) + start
        self.keys[low:high, slot, :, moved] = self.keys[low:high, slot, :, index]
        self.values[low:high, slot, :, moved] = self.values[low:high, slot, :, index]

    def gather(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move position start + nodes[i] of a row to start + i in all layers; ``nodes`` ascend."""
        self._move(0, self.keys.shape[0], slot, start, list(nodes))

    def rewind(self, slot: int, length: int) -> None:
        """Drop all tokens of a row after the first ``length``."""
        assert 0 <= length <= self.lengths[slot]
        if self.states is not None and length != self.lengths[slot]:
            assert length == 0, "a recurrent state is that of the whole text"
            self.states.clear(slot)
        self.lengths[slot] = length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kernels: native.Library | None) -> Tensor:
    """Zeroed memory: a masked position enters as 0 * value, which is NaN if the value is."""
    with torch.inference_mode(False):  # rows are also written outside of it
        if kernels is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        # a step reads a part of every layer, each on other pages unless these are large
        return zeroed(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
