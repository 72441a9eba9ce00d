"""Streams that ride in the target's pass on the native kernels: an adapter's weights as these take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.methods.streams.adapter import RootTerm, StreamModule
from anabranch.methods.terms import LowRank
from anabranch.model.decoder import Decoder
from anabranch.model.riding import NativeRider, Side, Term

__all__ = ["native_rider"]


def native_rider(target: Decoder, adapter: StreamModule, kind: str) -> NativeRider:
    """The rider of an adapter, without pruning, beside a target's weights of a ``kind``; shared by its drafters."""
    return adapter.shared(target, NativeRider, lambda: _packed(target, adapter, kind))


def _packed(target: Decoder, adapter: StreamModule, kind: str) -> NativeRider:
    shape = adapter.shape
    angles = shape.rotation_step * torch.arange(1, shape.num_streams + 1)
    return NativeRider(
        kind,
        start=adapter.start,
        streams=shape.num_streams,
        own=shape.main_attends == "own",
        from_main=adapter.reads_main,
        positioned=adapter.positioned,
        embeddings=adapter.initial_embeddings,
        init=_term(adapter.init),
        root=None if adapter.root is None else _root(adapter.root),
        angles=angles if shape.position == "rotation" else None,
        sides=_sides(adapter),
        exit=_term(adapter.prune),
        softcap=target.config.logit_softcap,
    )


def _sides(adapter: StreamModule) -> Sequence[Side]:
    return [
        Side(
            qkv=_term(layer.delta("qkv")),
            out=_term(layer.delta("out")),
            up=_term(layer.delta("up")),
            down=_term(layer.delta("down")),
            mlp=_term(layer.mlp),
            replaces=not layer.keep_mlp,
            gated=adapter.model.gated_mlp,
        )
        for layer in (adapter.layer(index) for index in range(adapter.start, adapter.model.num_layers))
    ]


def _term(term: LowRank | None) -> Term | None:
    return None if term is None else Term(term.down, term.up)


def _root(root: RootTerm) -> tuple[Tensor, Tensor, Tensor]:
    """The term of streams that ride, which do not know the emitted token."""
    return root.main, root.streams, root.up
