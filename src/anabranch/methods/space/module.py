"""SPACE's trained parameters: the embeddings of its mask tokens, and terms of the target's layers if it is tuned too.

B rows of the batch, N nodes, S masks, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anabranch.errors import InputError
from anabranch.methods.space.recipes import TUNED_UNIT, MaskConfig
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.config import StreamConfig
from anabranch.methods.terms import LayerTuning, terms_of
from anabranch.model.blocks import RowSide
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder

__all__ = ["MaskConfig", "MaskModule", "begin_with", "start_from_target"]


class MaskModule(StreamModule):
    """The embeddings of k masks [S, D]: k * h parameters.

    A mask is a stream that runs through all layers with the target's own weights. It starts from its embedding alone,
    as a token does, and not from its node's main row. ``scale`` is the size of the target's own embeddings, in units of
    which those of the masks are learned: so one learning rate fits all targets. ``tuning`` are the terms of the
    target's layers, if it is tuned too.
    """

    predictor = "mask"
    reads_main = False
    positioned = True
    config: MaskConfig
    scale: Tensor

    def __init__(self, model: ModelConfig, config: MaskConfig, vocabulary: Tensor | None = None) -> None:
        shape = StreamConfig(
            num_streams=config.num_masks,
            num_stream_layers=model.num_layers,
            stream_mlp="mlp+adapter",
            adapter_rank=0,
            pruning_rank=0,
        )
        super().__init__(model, shape, vocabulary)
        self.config = config
        self.register_buffer("scale", torch.ones(1))
        self.tuning = terms_of(model, config.lora_rank)
        assert isinstance(self.embeddings, nn.Parameter)
        if not self.embeddings.is_meta:
            nn.init.normal_(self.embeddings)

    def side(self, index: int, main: int) -> RowSide:
        """No terms of their own: masks run through the target's layers, in training through the tuned ones."""
        if self.tuning is None:
            return super().side(index, main)
        assert main == 0, "training computes masks by themselves"
        tuned = self.tuning[index]
        assert isinstance(tuned, LayerTuning)
        return tuned

    @property
    def initial_embeddings(self) -> Tensor:
        """The masks' embeddings as layer 0 sees them [S, D]."""
        assert isinstance(self.embeddings, nn.Parameter)
        return self.embeddings * self.scale

    def initial(self, main_BND: Tensor, emitted_BND: Tensor | None = None) -> Tensor:
        """The masks' embeddings, node by node [B, N S, D]; of ``main_BND`` only the shape and type matter."""
        b, n, d = main_BND.shape
        rows = self.initial_embeddings.to(main_BND.dtype)
        return rows.expand(b, n, -1, -1).reshape(b, n * self.config.num_masks, d)


def start_from_target(target: Decoder, module: MaskModule) -> None:
    """Set the scale of the masks to that of the target's own embeddings, as layer 0 sees them.

    Terms of the layers need a much smaller learning rate, so with them the unit of the masks is larger.
    """
    unit = 1.0 if module.tuning is None else TUNED_UNIT
    module.scale.fill_(unit * target.embedding.weight.detach().float().std() * target.config.embedding_scale)
    assert isinstance(module.embeddings, nn.Parameter)
    with torch.no_grad():
        module.embeddings.div_(unit)


def begin_with(module: MaskModule, trained: MaskModule) -> None:
    """Copy the masks of ``trained`` into the fresh ``module``; more masks start as copies of the last one.

    Raises InputError if ``trained`` has more.
    """
    mine, theirs = module.config.num_masks, trained.config.num_masks
    if theirs > mine:
        raise InputError(
            f"it has {theirs} masks, but this training uses {mine}; start from another adapter or give "
            f"--num-masks {theirs}"
        )
    assert isinstance(module.embeddings, nn.Parameter)
    assert isinstance(trained.embeddings, nn.Parameter)
    with torch.no_grad():
        more = trained.embeddings[-1:].expand(mine - theirs, -1)
        module.embeddings.copy_(torch.cat((trained.embeddings, more)) * (trained.scale / module.scale))
