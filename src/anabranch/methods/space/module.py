"""SPACE's trained parameters: the embeddings of its mask tokens, and terms of the target's layers if it is tuned too;
and their objective.

B rows of the batch, N nodes, S masks, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anabranch.errors import InputError
from anabranch.learning.examples import Batch
from anabranch.learning.objective import Scores, Segment
from anabranch.methods.space.recipes import TUNED_UNIT, MaskConfig, MaskLossOptions
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.objective import Frozen, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.terms import LayerTuning, terms_of
from anabranch.model.blocks import RowSide
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder

__all__ = ["MaskConfig", "MaskLossOptions", "MaskModule", "MaskObjective", "begin_with", "start_from_target"]


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


class MaskObjective(StreamObjective):
    """The ``Objective`` of masks: the streams' loss at every ``stride``-th position of a completion.

    k embeddings have few degrees of freedom, and every mask runs through the whole target and back. So a step sees many
    texts at few positions rather than few texts at all of theirs.
    """

    def __init__(
        self,
        target: Decoder,
        module: MaskModule,
        options: MaskLossOptions | None = None,
        *,
        segment: int = 128,
        frozen: Decoder | None = None,
    ) -> None:
        weights = options or MaskLossOptions()
        super().__init__(target, module, weights.of_streams, segment=segment, frozen=frozen)
        self.stride = weights.stride

    def predictions(self, batch: Batch) -> float:
        """About the number of predictions that ``loss`` scores."""
        return super().predictions(batch) / self.stride

    def loss(self, batch: Batch, frozen: Frozen, segment: Segment) -> Scores:
        """The loss of some positions of a segment; which ones depends on the batch, so that epochs differ."""
        positions_BP, real_BP = segment
        width, offset = positions_BP.shape[1], int(batch.scored_BT.sum()) % self.stride
        columns_BC = (offset - positions_BP[:, :1]) % self.stride + torch.arange(
            0, width, self.stride, device=positions_BP.device
        )
        inside_BC = columns_BC < width
        columns_BC = columns_BC.clamp(max=width - 1)
        chosen = Segment(positions_BP.gather(1, columns_BC), real_BP.gather(1, columns_BC) & inside_BC)
        return super().loss(batch, frozen, chosen)
