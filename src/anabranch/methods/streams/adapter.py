"""The trained parameters of Speculative Streaming and their row-wise computations.

B rows of the batch, N nodes, S streams, R rows of a pass, D model width, H query heads, K kv heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.drafting.trained import TrainedModule
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.scorer import Conditioner
from anabranch.methods.terms import LayerTuning, LowRank, terms_of
from anabranch.model.blocks import Block, RowSide
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.mlp import MLP
from anabranch.model.native_linear import NativeLinear
from anabranch.model.pack import Packable, PackedLinear, PackedWeight, packed_like, rounding
from anabranch.support.memory import give_back

__all__ = ["StreamAdapter", "StreamLayer", "StreamModule"]


Product: TypeAlias = Callable[[Tensor], Tensor]  # rows times a weight


class StreamLayer(nn.Module):
    """The trained parameters of one of the top layers, for stream rows only."""

    def __init__(self, model: ModelConfig, config: StreamConfig) -> None:
        super().__init__()
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.keep_mlp = config.stream_mlp == "mlp+adapter"
        width, inner = model.hidden_size, model.intermediate_size
        self.mlp = LowRank(width, width, config.adapter_rank, activation=True) if config.adapter_rank else None
        deltas = {
            "qkv": (width, q + 2 * kv, config.attention_rank),
            "out": (q, width, config.attention_rank),
            "up": (width, inner * (2 if model.gated_mlp else 1), config.mlp_rank),
            "down": (inner, width, config.mlp_rank),
        }
        for name, (width_in, width_out, rank) in deltas.items():
            self.register_module(name, LowRank(width_in, width_out, rank) if rank else None)
        self.merged: dict[str, PackedWeight] = {}
        self._rounded: dict[str, Tensor] = {}

    def delta(self, name: str) -> LowRank | None:
        """The term added to one of the layer's products: qkv, out, up or down."""
        term: LowRank | None = getattr(self, name)
        return term

    def product(self, name: str, linear: Product, x: Tensor) -> Tensor:
        """One of the layer's own products without its delta: ``linear`` unless it is computed with rounded weights."""
        if name not in self._rounded:
            return linear(x)
        assert isinstance(linear, nn.Linear)
        return F.linear(x, self._rounded[name], linear.bias)

    def round(self, block: Block, on: bool) -> None:
        """Compute as with the rounded weights that ``merge`` packs, in training; or not any more.

        What rounding changes is added to the layer's own weights, so that gradients pass it by (straight through).
        """
        self._rounded.clear()
        for module, name in block.linears(across=False) if on else ():
            linear, delta = getattr(module, name), self.delta(name)
            if not isinstance(linear, nn.Linear) or type(linear.weight) is not nn.Parameter:  # FSDP shards it otherwise
                raise CapabilityError(
                    "merged weights are rounded in training with target_format 'stored' only, and not if the target is "
                    "sharded; leave --rounding out"
                )
            if delta is not None:
                weight = linear.weight.detach()
                changed = rounding(weight + (delta.up @ delta.down).detach())
                self._rounded[name] = (weight + changed).to(weight.dtype)

    def merge(self, block: Block) -> None:
        """Merge the deltas into packed copies of the block's weights, for trailing streams.

        Takes memory for the copies, but is faster on a CPU, where narrow products per layer cost as much as wide ones.
        """
        if self.merged:
            return  # merged already for another drafter
        for module, name in block.linears(across=False):
            delta, linear = self.delta(name), getattr(module, name)
            if delta is not None and isinstance(linear, PackedLinear | NativeLinear):
                weight = linear.dense()
                # in float32: PyTorch multiplies in bf16 nine times as slowly on a processor that has no bf16
                term = (delta.up.float() @ delta.down.float()).to(weight.dtype)
                packed = packed_like(linear, weight + term, linear.bias)
                assert packed is not None
                self.merged[name] = packed
        give_back()


class StreamSide:
    """A ``RowSide``: rows from ``main`` on are stream rows, to which the adapter's deltas apply (lossless mode).

    Main rows are computed exactly as without streams.
    """

    def __init__(self, layer: StreamLayer, main: int) -> None:
        self.weights, self.main = layer, main

    def _add(self, delta: LowRank | None, x: Tensor, y: Tensor) -> Tensor:
        if delta is None:
            return y
        if self.main == 0:
            more: Tensor = delta(x)
            return y + more if torch.is_grad_enabled() or more.dtype != y.dtype else y.add_(more)
        return torch.cat((y[:, : self.main], y[:, self.main :] + delta(x[:, self.main :])), dim=1)

    def _product(self, name: str, linear: Product, x: Tensor) -> Tensor:
        if self.main == 0 and name in self.weights.merged:
            return self.weights.merged[name](x)  # type: ignore[no-any-return]
        return self._add(self.weights.delta(name), x, self.weights.product(name, linear, x))

    def qkv(self, h_BRD: Tensor, qkv: Product) -> Tensor:
        """The packed q, k, v projections, with deltas for stream rows."""
        return self._product("qkv", qkv, h_BRD)

    def out(self, a: Tensor, out: Product) -> Tensor:
        """The output projection, with a delta for stream rows."""
        return self._product("out", out, a)

    def mlp(self, h_BRD: Tensor, mlp: MLP, up: Product | None = None, down: Product | None = None) -> Tensor:
        """The MLP for main rows; for stream rows with deltas and the adapter added to it, or the adapter in its place.

        ``up`` and ``down`` compute the MLP's products if it does not do so itself.
        """
        up, down = mlp.up if up is None else up, mlp.down if down is None else down
        if self.weights.keep_mlp:
            y = mlp.through(h_BRD, partial(self._product, "up", up), partial(self._product, "down", down))
            return self._add(self.weights.mlp, h_BRD, y)
        assert self.weights.mlp is not None, "the config refuses rows without an MLP"
        streams: Tensor = self.weights.mlp(h_BRD[:, self.main :])
        return streams if self.main == 0 else torch.cat((mlp.through(h_BRD[:, : self.main], up, down), streams), dim=1)


class TunedSide:
    """A ``RowSide`` for training in shared mode: terms of the layer for all rows, deltas for stream rows besides.

    fixed  the terms get no gradients from these rows
    """

    def __init__(self, tuning: LayerTuning, streams: StreamSide, *, fixed: bool) -> None:
        self.added, self.streams = partial(tuning.added, fixed=fixed), streams

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The fused projections."""
        return self.streams.qkv(h_BRD, partial(self.added, "qkv", qkv))

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The output projection."""
        return self.streams.out(a, partial(self.added, "out", out))

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part."""
        up, down = partial(self.added, "mlp.up", mlp.up), partial(self.added, "mlp.down", mlp.down)
        return self.streams.mlp(h_BRD, mlp, up, down)


class RootTerm(Packable):
    """Conditions trailing streams on the token t + 1 emitted at their node t; they draft from t + 2 on.

    A stream that rides in the pass can only start from its node's main row. A trailing stream starts when t + 1 is
    known and can use both, as EAGLE's drafter uses features and shifted tokens (Li et al. 2024):

        S_j = f(M) + P_j + up silu(main M' + token E'[t + 1] + streams_j)      M', E': at unit RMS

    If the token is not known (riding), E' is zero; training leaves it out at some positions. Initialised to zero.
    """

    def __init__(self, width: int, inner: int, num_streams: int) -> None:
        super().__init__()
        self.main = nn.Parameter(torch.empty(inner, width))
        self.token = nn.Parameter(torch.empty(inner, width))
        self.up = nn.Parameter(torch.zeros(width, inner))
        self.streams = nn.Parameter(torch.zeros(num_streams, inner))
        if not self.main.is_meta:
            for weight in (self.main, self.token):
                nn.init.normal_(weight, std=1.0 / math.sqrt(width))

    @property
    def inputs(self) -> Tensor:
        """main and token concatenated, for a single product."""
        return torch.cat((self.main, self.token), dim=1)

    def products(self) -> Iterable[tuple[str, Tensor]]:
        """The products of ``forward``."""
        return (("inputs", self.inputs), ("up", self.up))

    def forward(self, main_BND: Tensor, emitted_BND: Tensor | None) -> Tensor:
        """The term to add to the streams [B, N, S, D]; ``emitted_BND`` are embeddings, zero if unknown."""
        emitted_BND = torch.zeros_like(main_BND) if emitted_BND is None else emitted_BND.to(main_BND.dtype)
        both = F.rms_norm(torch.stack((main_BND, emitted_BND), dim=2), main_BND.shape[-1:], eps=1e-9)
        z = self.linear(both.flatten(2), "inputs")
        return self.linear(F.silu(z[:, :, None] + self.streams), "up")


class StreamModule(TrainedModule):
    """The trained module of a method that drafts by streams: Speculative Streaming and its relatives.

    shape        the configuration of its streams; ``config`` is what the adapter folder stores
    predictor    what a stream is called in sources, logs and cards
    reads_main   whether streams start from their node's main row; otherwise the target is not tapped
    positioned   whether the target's learned positions, if it has any, are added to streams as to tokens

    ``vocabulary`` [Vd] has the sorted token ids of the draft vocabulary: drafting only frequent tokens is cheaper
    (FR-Spec, Zhao et al. 2025) and does not affect verification.
    """

    predictor = "stream"
    reads_main = True
    positioned = False

    def __init__(self, model: ModelConfig, config: StreamConfig, vocabulary: Tensor | None = None) -> None:
        super().__init__()
        if replace(model, encoder=None) != model.dense():
            raise CapabilityError(
                f"{self.predictor}s need layers of attention and an MLP, and those of {model.family} models differ; "
                "use another drafter, such as prompt_lookup, ngram or draft_model"
            )
        if config.num_stream_layers > model.num_layers:
            raise InputError(
                f"num_stream_layers is {config.num_stream_layers}, but the target has only {model.num_layers} layers"
            )
        if config.position == "rotation" and not config.rotation_step:
            longest = model.max_positions + config.num_streams
            config = replace(config, rotation_step=math.pi / (2 * longest))
        self.model, self.shape = model, config
        width = model.hidden_size
        self.start = model.num_layers - config.num_stream_layers
        self.embeddings = (
            nn.Parameter(torch.empty(config.num_streams, width)) if config.position == "embedding" else None
        )
        if self.embeddings is not None and not self.embeddings.is_meta:
            nn.init.normal_(self.embeddings, std=0.02)
        self.learning_rates: dict[str, float] = {}  # see rates
        self.init = LowRank(width, width, config.init_rank) if config.init_rank else None
        self.root = RootTerm(width, config.root_width, config.num_streams) if config.root_width else None
        self.layers = nn.ModuleList(StreamLayer(model, config) for _ in range(config.num_stream_layers))
        self.prune = LowRank(width, width, config.pruning_rank) if config.pruning_rank else None
        self.conditioner = (
            Conditioner(width, config.conditioning, config.conditioning_rank) if config.conditioning != "none" else None
        )
        ids = torch.arange(model.vocab_size) if vocabulary is None else vocabulary.long().cpu()
        self.register_buffer("vocabulary", ids, persistent=True)

    @property
    def lowest(self) -> int:
        """The first layer that streams run through."""
        return self.start

    @property
    def terms(self) -> list[nn.Module]:
        """The trained terms besides those of layers: of roots, and of conditions."""
        return [term for term in (self.root, self.conditioner) if term is not None]

    def rates(self) -> Mapping[str, float]:
        """Parameters may learn in proportion to their size or to the states': ``begin.start_streams``."""
        return self.learning_rates

    def prepare(self, target: Decoder, options: Any, step: int) -> None:
        """Round the weights in every other step, if at all: other backends draft with weights as they are."""
        if options.rounding:
            self.round(target, step % 2 == 0)

    def round(self, target: Decoder, on: bool) -> None:
        """Compute as with the rounded weights that the native kernels draft with, in training; or not any more."""
        with torch.autocast(target.device.type, enabled=False):
            for index in range(self.start, len(target.blocks)):
                block = target.blocks[index]
                assert isinstance(block, Block)
                self.layer(index).round(block, on)
            for part in (self.root, self.conditioner):
                if part is not None:
                    part.round(on)

    @property
    def initial_embeddings(self) -> Tensor | None:
        """The vectors added to the streams' start states [S, D]; None: nothing is added."""
        return self.embeddings

    def layer(self, index: int) -> StreamLayer:
        """The trained part of the target's layer ``index`` (counted from the bottom of the target)."""
        layer = self.layers[index - self.start]
        assert isinstance(layer, StreamLayer)
        return layer

    def side(self, index: int, main: int) -> RowSide:
        """The terms that rows from ``main`` on add to the products of the target's layer ``index``."""
        return StreamSide(self.layer(index), main)

    def initial(self, main_BND: Tensor, emitted_BND: Tensor | None = None) -> Tensor:
        """Main rows before layer N - N_s [B, N, D] -> stream rows [B, N S, D], node by node (ACL eq. 4).

        ``emitted_BND`` are the embeddings of the tokens emitted at the nodes, for trailing streams.
        """
        b, n, d = main_BND.shape
        base = main_BND if self.init is None else main_BND + self.init(main_BND)
        streams = base[:, :, None, :].expand(b, n, self.shape.num_streams, d)
        if self.embeddings is not None:
            streams = streams + self.embeddings.to(streams.dtype)
        if self.root is not None:
            streams = streams + self.root(main_BND, emitted_BND)
        return streams.reshape(b, n * self.shape.num_streams, d)

    def early_exit(self, main_BND: Tensor) -> Tensor:
        """o(M) of ACL section 2.3, in residual form M + up(down(M)): at zero it is the logit lens."""
        return main_BND if self.prune is None else main_BND + self.prune(main_BND)


class StreamAdapter(StreamModule):
    """All parameters that Speculative Streaming trains for one target.

    Parameters with the paper's configuration: gamma * h stream embeddings, 2 * 8 * h of the pruning adapter, and
    N_s * 2 * R_s * h of the stream adapters in lossless mode (ACL table 3;
    ``tests/methods/streams/test_parameters.py``).

    tuning  the terms of the target's layers while it is tuned together with the streams (shared mode), else None
    """

    config: StreamConfig

    def __init__(self, model: ModelConfig, config: StreamConfig, vocabulary: Tensor | None = None) -> None:
        tuning = terms_of(model, config.lora_rank)  # drawn first: as ``train lora`` draws them
        super().__init__(model, config, vocabulary)
        self.config, self.tuning = self.shape, tuning

    def clipped(self, options: Any) -> list[list[nn.Parameter]]:
        """All parameters; where their losses are apart, the terms and those of the streams."""
        if self.tuning is None or not options.detach:
            return super().clipped(options)
        terms = list(self.tuning.parameters())
        whose = set(terms)
        return [terms, [parameter for parameter in self.parameters() if parameter not in whose]]

    def side(self, index: int, main: int, *, fixed: bool = False) -> RowSide:
        """As ``StreamModule.side``; in training in shared mode with the terms of the layer for all rows.

        ``fixed``: the terms get no gradients from these rows.
        """
        streams = StreamSide(self.layer(index), main)
        if self.tuning is None:
            return streams
        tuned = self.tuning[index]
        assert isinstance(tuned, LayerTuning)
        return TunedSide(tuned, streams, fixed=fixed)
