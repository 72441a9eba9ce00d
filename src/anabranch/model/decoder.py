"""The target: one decoder for every family, described by a ModelConfig, with passes run by a backend.

A pass takes the ``Inputs`` of every row and returns a ``PassResult``. A drafter can take part in the pass through a
``Rider``, which may prune nodes at one layer and add rows of its own from there on.

M nodes of all rows, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.model.backends import TorchBackend
from anabranch.model.cache import Cache, bytes_per_token
from anabranch.model.config import ModelConfig
from anabranch.model.encoder import Memory, Source
from anabranch.model.inputs import Inputs
from anabranch.model.lora import Lora, RowLoras
from anabranch.model.network import Network
from anabranch.model.passes import Need, Pass, PassRequest, PassResult, Rider
from anabranch.sampling import SamplingParams

__all__ = ["Decoder"]


class Decoder(Network):
    """A network, and the ``backend`` that runs its passes: PyTorch, captured graphs or the native kernels.

    rider  rows that are part of the model itself, since main rows attend to them (``Rider.alters``); None: none. They
           are in every pass that decodes, plain decoding included, but not in those that read a prompt: the last token
           of the prompt and all later tokens have them
    quantized_cache  its caches hold keys and values in int8 (``quantize_cache``)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.backend = TorchBackend()
        self.rider: Rider | None = None
        self.loras = RowLoras()
        self.quantized_cache = False
        self._memories: WeakKeyDictionary[Source, Memory] = WeakKeyDictionary()

    def encode(self, source: Source) -> Memory:
        """The keys and values of a source, which was checked; computed once, and kept while the object is in use."""
        memory = self._memories.get(source)
        if memory is None:
            self._memories[source] = memory = self.memory(self.backend.encoded(self, source))
        return memory

    def memory(self, states_SD: Tensor, first: int = 0) -> Memory:
        """The keys and values of the encoder's output in the decoder's layers from ``first`` on."""
        blocks: Any = self.blocks[first:]
        pairs = [block.cross.memory(states_SD) for block in blocks]
        return Memory(*map(torch.stack, zip(*pairs, strict=True)))

    def source_size(self, source: Source | None) -> int:
        """The positions that the encoder reads of a request's source."""
        return 0 if self.encoder is None or source is None else self.encoder.size(source)

    def add_lora(self, name: str, lora: Lora) -> None:
        """Let rows choose a LoRA by this name. Raises CapabilityError for packed experts."""
        if self.backend.kernels is not None and self.config.experts is not None:
            raise CapabilityError(
                f"{self.config.family} models, which have experts, take LoRAs per request (loras=) in PyTorch only; "
                "load the model with quantize='none'"
            )
        self.loras.add(name, lora, self)

    def quantize_cache(self) -> None:
        """Keep keys and values in int8 from now on: a model of its own, as one with quantised weights is.

        Raises CapabilityError if the native kernels do not run all layers.
        """
        if self.backend.kernels is None:
            raise CapabilityError(
                "kv='int8' keeps keys and values in int8, which only the native kernels on a CPU read, and they do not "
                "run this model here ('anabranch info' tells why); leave kv out"
            )
        if self.rider is not None and not self.rider.native:
            raise CapabilityError(
                "kv='int8' keeps keys and values in int8, which only the native kernels write, and PyTorch runs the "
                "streams that are part of this model; leave kv out"
            )
        self.quantized_cache = True

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for ``rows`` texts of up to ``capacity`` tokens. Raises OutOfMemoryError."""
        return Cache(
            *(self.config,),
            rows=rows,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            kernels=self.backend.kernels,
            quantized=self.quantized_cache,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return bytes_per_token(self.config, self.dtype, quantized=self.quantized_cache)

    @property
    def ragged(self) -> bool:
        """True if the rows of a pass may have different numbers of nodes; otherwise they are padded to the widest."""
        return self.backend.ragged

    def decoding(self) -> AbstractContextManager[None]:
        """A context for decoding, in which PyTorch's threads do not slow down the backend's."""
        return self.backend.decoding(self)

    def inference(self) -> AbstractContextManager[None]:
        """``decoding`` in PyTorch's inference mode. Entering it again is nearly free, so every step can."""
        return self.decoding() if torch.is_inference_mode_enabled() else self._inference()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        with torch.inference_mode(), self.decoding():
            yield

    def normed(self, x: Tensor) -> Tensor:
        """The last norm [..., D], in the weights' type."""
        return self.backend.normed(self, x)

    def layers(self, x: Tensor, run: Pass, low: int, high: int) -> Tensor:
        """Run main rows [B, N, D] through layers ``low`` to ``high`` - 1, in the backend's dtype."""
        return self.backend.layers(self, x, run, low, high)

    def head_rows(self, tokens: Tensor) -> Tensor:
        """The rows of the head's weight [..., D] for tokens [...]."""
        return self.backend.head_rows(self, tokens)

    def choose(self, x: Tensor) -> Tensor:
        """The greedy tokens [...] of normed hidden states [..., D]; the lowest id among equals."""
        return self.backend.choose(self, x)

    def draw(
        self,
        logits_NV: Tensor,
        params: SamplingParams,
        keys_N: NDArray[np.uint64],
        histories: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """The target's own tokens [N], as ``sampling.target_tokens`` draws them."""
        return self.backend.draw(logits_NV, params, keys_N, histories)

    def forward(
        self,
        inputs: Inputs,
        cache: Cache,
        *,
        slots: slice | None = None,
        taps: Sequence[int] = (),
        rider: Rider | None = None,
        need: Need = "logits",
        loras: Sequence[str | None] = (),
    ) -> PassResult:
        """Run one pass over the nodes of ``inputs``; their keys and values are appended to ``cache``, not committed.

        slots    the cache slots of the rows (default: all in use)
        taps     layers before which the main rows are returned
        rider    a drafter's part in the pass, or the target's own; None: no rider. Takes no prompt tokens (``Inputs``)
        need     the output: keys and values only; rows after the last norm; or these with their logits, greedy tokens,
                 or accepted paths (greedy tokens where the backend does not verify)
        loras    the name of each row's LoRA, or None [B]; empty: no row has one

        Raises InputError if the nodes do not fit the cache or the learned positions.
        """
        slots = slice(0, cache.count) if slots is None else slots
        cache.begin(inputs.width, slots)
        if self.config.position == "learned" and max(cache.lengths[slots]) + inputs.width > self.config.max_positions:
            self._check_positions(inputs, cache.lengths[slots])
        sides = self.loras.sides(loras)
        if need == "paths" and not self.backend.verifies:
            need = "tokens"
        assert sides is None or rider is None or not rider.rides, "rows that ride take no LoRA"
        assert rider is None or not inputs.prefill_B, "a rider takes part in all nodes of a pass"
        request = PassRequest(inputs, cache, slots, taps, rider, need, sides)
        result = self.backend.run(self, request)
        if need == "logits":
            return result._replace(logits_MV=self.logits(result.hidden_MD))
        if need in ("tokens", "paths") and result.tokens_M is None and result.verdicts is None:
            return result._replace(tokens_M=self.choose(result.hidden_MD).cpu().numpy())
        return result

    def _check_positions(self, inputs: Inputs, lengths_B: Sequence[int]) -> None:
        """Raise InputError if the nodes reach beyond the learned positions."""
        limit = self.config.max_positions
        # the depth may be less than the width: siblings share a position
        reach = int((inputs.depths_BN.max(axis=1) + lengths_B).max()) + 1
        if reach > limit:
            raise InputError(
                f"the text with its drafts needs {reach} positions, but the target has {limit}; lower max_new_tokens"
            )
