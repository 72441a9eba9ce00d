"""EAGLE (Li et al. 2024): one autoregressive layer on the target's features drafts; and the method's entry."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.methods.eagle.drafter import EagleDrafter, EagleSettings
from anabranch.methods.eagle.module import EagleModule, begin_with
from anabranch.methods.eagle.objective import EagleObjective
from anabranch.methods.eagle.published import LAYOUTS
from anabranch.methods.eagle.recipes import TRAINING, EagleConfig
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "TRAINED", "EagleSettings"]

# tokens per step and speedup on MT-Bench, for Vicuna, as Speculative Streaming's paper quotes them (ACL tables 6 and 1)
PUBLISHED = {"Llama-2-7B": (3.94, 2.90), "Llama-2-13B": (3.98, 3.07), "Vicuna-33B": (3.68, 2.95)}


def _build(target: Decoder, settings: EagleSettings, module: nn.Module | None) -> Drafter:
    return EagleDrafter(target, TRAINED.require(module, "eagle"), settings)


def _describe(config: EagleConfig) -> str:
    return f"one layer on the fused states before layers {config.taps}" if config.taps else "one layer on features"


def _count(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """One path of ``gamma`` steps of a 2h x h matrix, a decoder layer and the target's output head."""
    config = decoder.config
    head = EagleModule(replace(config, vocab_size=1), EagleConfig())
    read = matrix_weights(head) + decoder.head.weight.numel()
    cache = 2 * config.num_kv_heads * config.head_dim * shape.context
    operations = 2 * read + attention_operations(config, shape.context)
    return DraftCost(head.num_parameters(), shape.gamma * WEIGHT_BYTES * (read + cache), shape.gamma * operations)


TRAINED = Trained(
    training=TRAINING,
    module=EagleModule,
    objective=EagleObjective,
    describe=_describe,
    begin=begin_with,
    packed=lambda recipe: True,
    published=LAYOUTS,
)

METHOD = Method(
    name="eagle",
    summary="EAGLE: one autoregressive layer on the target's features drafts; needs a trained head",
    settings=EagleSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=static"),
    candidates=sized(EagleSettings, BUDGETS),
    labels=("eagle",),
    counts={"eagle": _count},
    published=PUBLISHED,
)
