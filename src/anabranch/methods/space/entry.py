"""SPACE: learned mask tokens behind the text predict the tokens after the next one (Yi et al., Findings of ACL 2024).

k masks follow every node of the draft tree. The pass that verifies the draft computes them too, and those behind the
accepted node are the next draft. They are streams (``anabranch.methods.streams``) through all layers, with the target's
own weights and an embedding of their own as the initial state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.errors import CapabilityError
from anabranch.methods.space.module import MaskConfig, MaskModule
from anabranch.methods.space.trained import TRAINED
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.settings import TreeSettings
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "SpaceSettings"]

BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


@dataclass(frozen=True)
class SpaceSettings(TreeSettings):
    """Settings of ``space:...``: those of trees, and ``placement``.

    placement  ride: masks of every node are part of the target's pass (the paper); trail: those of the accepted node
               follow it; auto: trail on a CPU
    """

    placement: str = "auto"


def _build(target: Decoder, settings: SpaceSettings, module: nn.Module | None) -> Drafter:
    if module is None:
        raise CapabilityError(
            "the drafter 'space' needs an adapter that was trained for this target, and there is none; give one "
            "with adapter=FOLDER, train one with 'anabranch train space', or use drafter='prompt_lookup'"
        )
    assert isinstance(module, MaskModule)
    return StreamDrafter(
        target, module, settings.options, placement=settings.placement, adaptive=settings.adaptive, name="space"
    )


def _count(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """gamma masks at each node, as rows of the target's own pass; the head reads those of the accepted node alone."""
    block, config = decoder.blocks[0], decoder.config
    per_row = config.num_layers * (2 * matrix_weights(block) + attention_operations(config, shape.context))
    own = MaskModule(config, MaskConfig(shape.gamma)).num_parameters()
    head = shape.gamma * 2 * decoder.head.weight.numel()
    return DraftCost(own, WEIGHT_BYTES * own, shape.nodes * shape.gamma * per_row + head)


METHOD = Method(
    name="space",
    summary="SPACE: learned mask tokens behind the text predict the next tokens; needs a trained adapter",
    settings=SpaceSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=product", "placement=ride"),
    candidates=sized(SpaceSettings, BUDGETS),
    order=numbered("mask"),
    counts={"space": _count},
)
