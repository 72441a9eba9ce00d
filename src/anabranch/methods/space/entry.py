"""SPACE: learned mask tokens behind the text predict the tokens after the next one (Yi et al., Findings of ACL 2024).

k masks follow every node of the draft tree. The pass that verifies the draft computes them too, and those behind the
accepted node are the next draft. They are streams (``anabranch.methods.streams``) through all layers, with the target's
own weights and an embedding of their own as the initial state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.methods.space.module import MaskModule, MaskObjective, begin_with, start_from_target
from anabranch.methods.space.recipes import TRAINING, MaskConfig, MaskLossOptions
from anabranch.methods.streams.draft import StreamSettings, StreamTrees
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.tuning import TunedObjective, export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "TRAINED", "SpaceSettings", "mask_objective"]


@dataclass(frozen=True)
class SpaceSettings(StreamTrees):
    """Settings of ``space:...``: those of trees, and ``placement``.

    placement  ride: masks of every node are part of the target's pass (the paper); trail: those of the accepted node
               follow it; auto: trail on a CPU
    """

    placement: str = "auto"

    @property
    def of_streams(self) -> StreamSettings:
        """These settings for the drafter of streams."""
        return StreamSettings(**vars(self))


def _build(target: Decoder, settings: SpaceSettings, module: nn.Module | None) -> Drafter:
    return StreamDrafter(target, TRAINED.require(module, "space"), settings.of_streams, name="space")


def _count(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """gamma masks at each node, as rows of the target's own pass; the head reads those of the accepted node alone."""
    block, config = decoder.blocks[0], decoder.config
    per_row = config.num_layers * (2 * matrix_weights(block) + attention_operations(config, shape.context))
    own = MaskModule(config, MaskConfig(shape.gamma)).num_parameters()
    head = shape.gamma * 2 * decoder.head.weight.numel()
    return DraftCost(own, WEIGHT_BYTES * own, shape.nodes * shape.gamma * per_row + head)


def mask_objective(
    target: Decoder, module: MaskModule, options: MaskLossOptions, *, segment: int = 128, frozen: Decoder | None = None
) -> Objective[Any]:
    """The objective of masks, or of masks and target together (SAR-SFT): ``CE(main) + masks * CE(masks)``.

    The paper replaces k tokens at one random place of some answers by masks, so that one model learns both to continue
    a text and to fill in masks. Here masks follow every ``stride``-th position of each completion, beside the text.
    """
    masks = MaskObjective(target, module, options, segment=segment, frozen=frozen)
    if module.tuning is None:
        return masks
    each = masks.predictors / options.stride
    return TunedObjective(
        *(target, module.tuning, masks), frozen=frozen, each=each, share=options.masks, soft=options.soft
    )


def _describe(config: MaskConfig) -> str:
    return f"{config.num_masks} mask tokens"


TRAINED = Trained(
    training=TRAINING,
    module=MaskModule,
    objective=mask_objective,
    describe=_describe,
    begin=begin_with,
    fresh=lambda target, module, examples, frozen: start_from_target(target, module),
    export=export_tuned,
)

METHOD = Method(
    name="space",
    summary="SPACE: learned mask tokens behind the text predict the next tokens; needs a trained adapter",
    settings=SpaceSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=product", "placement=ride"),
    candidates=sized(SpaceSettings, BUDGETS),
    labels=("mask",),
    counts={"space": _count},
)
