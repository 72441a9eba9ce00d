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
from array import array
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
from anabranch.support.memory import choose_pages, free_memory, untouched_is_free, zeroed
from anabranch.support.nearest import hint

__all__ = ["KINDS", "Cache", "bytes_per_token", "check_kind", "room_for", "shared_length"]

KINDS = ("auto", "int8")  # of caches: in the type of the weights, or quantised

MIN_CAPACITY = 512
SMALL = 2**24  # bytes; smaller caches are allocated without looking at free memory
GROUP = 32  # channels that share a scale in a quantised cache
HEADROOM = 2**27  # bytes left free for the tensors of passes
FULL = 4  # a text in large pages may take up to so many times its own memory
RESERVED = 64  # rows of addresses that a cache of the kernels has, if memory for half of them is free


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

    ``keys`` and ``values`` are [layers, rows, K, C, E], row by row in memory. Slots 0 to count - 1 are in use; a row
    that leaves changes places with the last one, so that a step is over a slice of slots. With ``kernels``, memory is
    in large pages (but see ``expect``), the kernels move committed keys and values, and no row is copied because others
    come and go: addresses are reserved for more rows than there are, and a slot has the row of memory ``places[slot]``.
    Without, it has the row of its own number.

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
        self.config, self.dtype, self.quantized = config, dtype, quantized
        self.capacity, self._device, self._kernels = capacity, device, kernels
        self._require(rows)
        width, stored = _stored(config, dtype, quantized=quantized)
        self._stays = kernels is not None and config.recurrent is None  # whether rows stay where they are
        free = free_memory() if self._stays and untouched_is_free() else None
        reserved = max(rows, min(RESERVED, 0 if free is None else free // (2 * capacity * self.token_bytes)))
        shape = (reserved, len(config.kv_layers), config.num_kv_heads, capacity, width)
        try:
            self._keys, self._values = (_zeros(shape, stored, device, kernels).transpose(0, 1) for _ in range(2))
        except (RuntimeError, OutOfMemoryError) as error:  # of PyTorch (on a GPU too), of ``zeroed``
            raise self._short(rows, "more than is") from error
        self._use(rows)
        self.places = array("q", range(reserved))
        self._index = {layer: index for index, layer in enumerate(config.kv_layers)}
        recurrent = config.recurrent
        self.states = None if recurrent is None else States(config, recurrent, rows, dtype, device)
        self.graphs = Graphs()  # of computations that read or write these rows
        self.lengths: list[int] = []
        self.prompts: list[int] = []  # the length for which each row's prompt is rotated (``Rope``)
        self.memories: list[Memory | None] = []  # of the rows' sources, which rows may share
        self._width = 0
        self._selections: list[tuple[int, Tensor]] = []

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    def _use(self, rows: int) -> None:
        """Let ``keys`` and ``values`` be those of so many rows of memory, of which more may be reserved."""
        self.rows, self.keys, self.values = rows, self._keys[:, :rows], self._values[:, :rows]

    def _require(self, rows: int) -> None:
        """Raise OutOfMemoryError where memory does not suffice for so many more rows."""
        needed = rows * self.capacity * self.token_bytes
        if self._device.type == "cpu" and needed > SMALL:  # a GPU's allocator raises an error, Linux ends the process
            free = free_memory()
            if free is not None and needed > free - HEADROOM:
                raise self._short(rows, f"and {max(0, free) / 2**30:.2f} GiB are")

    def _short(self, rows: int, free: str) -> OutOfMemoryError:
        needed = rows * self.capacity * self.token_bytes / 2**30
        return OutOfMemoryError(
            f"the cache for {rows} row(s) of {self.capacity:,} tokens needs {needed:.2f} GiB on {self._device}, {free} "
            "free; use fewer rows, a shorter prompt or a smaller max_new_tokens"
        )

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

    def expect(self, slot: int, tokens: int) -> None:
        """Choose the pages of a slot's memory before it is used for a text of about so many tokens.

        A step reads a part of every layer and head, which is faster in large pages: a plain step of 512 or 4,000 tokens
        takes 0.9 of the time. But a text that is short for its row touches each of them, which takes the memory and,
        when first written to, the time of a whole row.
        """
        if self._stays:
            for stored in (self._keys, self._values):
                choose_pages(stored[:, self.places[slot]], large=FULL * tokens >= self.capacity)

    def remove_row(self, slot: int) -> int:
        """Free ``slot``; return the slot whose row changed places with it (the last one), or ``slot``."""
        last = self.count - 1
        self.swap(slot, last)
        for each in (self.lengths, self.prompts, self.memories):
            each.pop()
        return last

    def fork(self, source: int, slot: int, length: int) -> None:
        """Copy the first ``length`` tokens in ``source`` to ``slot``; both may be unused.

        The caller sets the length of ``slot`` when it starts to use it.
        """
        if source != slot:
            if self.states is not None:
                assert length == self.lengths[source], "a recurrent state is that of the whole text"
                self.states.copy(source, slot)
            source, slot = self.places[source], self.places[slot]
            self._keys[:, slot, :, :length] = self._keys[:, source, :, :length]
            self._values[:, slot, :, :length] = self._values[:, source, :, :length]

    def swap(self, one: int, other: int) -> None:
        """Let two rows change places. Where these are places in memory, the shorter one is copied twice."""
        if one == other:
            return
        if not self._stays:
            self._swap_memory(*sorted((one, other), key=self.lengths.__getitem__))
        rows: tuple[Any, ...] = (self.lengths, self.prompts, self.memories, *([self.places] if self._stays else []))
        for each in rows:
            each[one], each[other] = each[other], each[one]

    def _swap_memory(self, short: int, long: int) -> None:
        kept, state = self.taken(short, 0, self.lengths[short]), None if self.states is None else self.states.row(short)
        self.fork(long, short, self.lengths[long])
        self.put(long, 0, *kept)
        if self.states is not None and state is not None:
            self.states.put(long, state)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return bytes_per_token(self.config, self.dtype, quantized=self.quantized)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.capacity * self.token_bytes + (0 if self.states is None else self.states.nbytes)

    def taken(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of tokens ``start`` to ``end`` - 1 of a slot [layers, K, n, E], as stored."""
        place = self.places[slot]
        return self._keys[:, place, :, start:end].clone(), self._values[:, place, :, start:end].clone()

    def put(self, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values as ``taken`` returns them, from token ``start`` of a slot on."""
        end, place = start + keys.shape[2], self.places[slot]
        self._keys[:, place, :, start:end], self._values[:, place, :, start:end] = keys, values

    def resized(self, rows: int, capacity: int, *, kept: Mapping[int, int] | None = None) -> Cache:
        """A cache of another size with the rows in use; this one itself where addresses for more rows are reserved.

        kept  by free slot, how many tokens of its contents are copied too

        Raises OutOfMemoryError if memory does not suffice; this cache stays as it is.
        """
        if capacity == self.capacity and self.rows <= rows <= len(self.places) and self._stays:
            self._require(rows - self.rows)
            self._use(rows)
            return self
        same: Any = {"dtype": self.dtype, "device": self._device, "kernels": self._kernels}
        made = Cache(self.config, rows=rows, capacity=capacity, quantized=self.quantized, **same)
        assert self.count <= rows
        spans = dict(enumerate(self.lengths)) | {slot: n for slot, n in (kept or {}).items() if slot < rows}
        for slot, span in spans.items():  # no more: pages that nobody wrote to take no memory
            place = self.places[slot]
            made.expect(slot, span)
            made._keys[:, slot, :, :span] = self._keys[:, place, :, :span]
            made._values[:, slot, :, :span] = self._values[:, place, :, :span]
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
        self._written: tuple[Tensor, Tensor] | None = None

    def place(self, index_BN: Tensor) -> None:
        """Set the positions that this step writes, as a tensor: a captured graph must not depend on ``lengths``."""
        slots = self._slots
        rows_B = torch.arange(slots.start, slots.stop, device=index_BN.device)
        self._written = torch.as_tensor(self._of(rows_B))[:, None], index_BN

    def append(self, layer: int, k_BNKE: Tensor, v_BNKE: Tensor) -> None:
        """Write this step's keys and values of one layer after each row's committed tokens."""
        assert not self.quantized, "only the kernels write a quantised cache"
        n, layer = k_BNKE.shape[1], self._index[layer]
        slots = self._slots
        if slots.stop - slots.start == 1 and self._written is None:
            start, place = self.lengths[slots.start], self.places[slots.start]
            self._keys[layer, place, :, start : start + n] = k_BNKE[0].transpose(0, 1)
            self._values[layer, place, :, start : start + n] = v_BNKE[0].transpose(0, 1)
        else:
            if self._written is None:
                device = self._device
                starts = torch.tensor(self.lengths[slots], device=device)
                self.place(starts[:, None] + torch.arange(self._width, device=device))
            assert self._written is not None
            rows_B1, index_BN = self._written
            self._keys[layer][rows_B1, :, index_BN[:, :n]] = k_BNKE
            self._values[layer][rows_B1, :, index_BN[:, :n]] = v_BNKE

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """The first ``span`` keys and values [B, K, span, E] of the rows of this step."""
        return self.of_rows(layer, self._slots, span)

    def of_rows(self, layer: int, slots: slice | Tensor, span: int) -> tuple[Tensor, Tensor]:
        """The first ``span`` keys and values [B, K, span, E] of the rows in ``slots``."""
        layer = self._index[layer]
        slots = self._of(slots)
        keys, values = self._keys[layer, slots, :, :span], self._values[layer, slots, :, :span]
        return (self.dequantized(keys), self.dequantized(values)) if self.quantized else (keys, values)

    def _of(self, slots: slice | Tensor) -> slice | Tensor:
        """The rows of memory that slots have."""
        if isinstance(slots, slice) and self.places[slots] == array("q", range(slots.start, slots.stop)):
            return slots
        return torch.tensor(self.places)[slots] if self._stays else slots

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
            high, nodes = len(self._keys), list(range(len(path)) if moved else path)
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
            move, place = self._kernels.move, self.places[slot]
            move(self._keys, self._values, range(low, high), place, start, np.asarray(nodes, np.int64))
            return
        moved = slice(start, start + len(nodes))
        index = torch.tensor(nodes, device=self._device) + start
        self._keys[low:high, slot, :, moved] = self._keys[low:high, slot, :, index]
        self._values[low:high, slot, :, moved] = self._values[low:high, slot, :, index]

    def gather(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move position start + nodes[i] of a row to start + i in all layers; ``nodes`` ascend."""
        self._move(0, len(self._keys), slot, start, list(nodes))

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
