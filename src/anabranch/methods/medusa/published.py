"""Medusa's heads as published: in the authors' names (FasterDecoding/Medusa) and in vLLM's.

    0.0.linear.weight, 0.0.linear.bias, 0.1.weight, 1.0.linear.weight, ...      head.block, then the head's own output
    blocks.0.layers.0.weight, blocks.0.layers.0.bias, lm_heads.0.weight, ...    vLLM's

The authors' names may begin with ``medusa_head.``. All heads in the file are read: some config.json state fewer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from anabranch.drafting.published import Layout, Published
from anabranch.methods.medusa.module import MedusaConfig
from anabranch.model.decoder import Decoder

__all__ = ["LAYOUTS"]

PREFIX = "medusa_head."


def _fits(names: Mapping[str, Tensor]) -> bool:
    return any(re.fullmatch(rf"(?:{re.escape(PREFIX)})?0\.0\.linear\.weight", name) for name in names)


def _read(file: Published, target: Decoder) -> tuple[MedusaConfig, dict[str, Tensor]]:
    prefix = PREFIX if any(name.startswith(PREFIX) for name in file) else ""
    start = re.escape(prefix)
    heads = file.numbers(rf"{start}(\d+)\.\d+\.linear\.weight")
    blocks = file.numbers(rf"{start}0\.(\d+)\.linear\.weight")
    return _weights(
        *(file, target, heads, blocks),
        block=f"{prefix}{{head}}.{{block}}.linear",
        output=f"{prefix}{{head}}.{blocks}.weight",
    )


def _fits_vllm(names: Mapping[str, Tensor]) -> bool:
    return "blocks.0.layers.0.weight" in names and "lm_heads.0.weight" in names


def _read_vllm(file: Published, target: Decoder) -> tuple[MedusaConfig, dict[str, Tensor]]:
    heads = file.numbers(r"blocks\.(\d+)\.layers\.\d+\.weight")
    blocks = file.numbers(r"blocks\.0\.layers\.(\d+)\.weight")
    return _weights(
        *(file, target, heads, blocks),
        block="blocks.{head}.layers.{block}",
        output="lm_heads.{head}.weight",
    )


def _weights(
    file: Published, target: Decoder, heads: int, blocks: int, *, block: str, output: str
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """The module's weights from names with the numbers of ``head`` and ``block`` in them."""
    width, vocabulary = target.config.hidden_size, target.config.vocab_size
    config = MedusaConfig(heads, blocks, head="own")
    weights: dict[str, Tensor] = {}
    for head in range(heads):
        for number in range(blocks):
            name = block.format(head=head, block=number)
            weights[f"blocks.{head}.{number}.weight"] = file.take(f"{name}.weight", width, width)
            weights[f"blocks.{head}.{number}.bias"] = file.take(f"{name}.bias", width)
        weights[f"weights.{head}"] = file.take(output.format(head=head), vocabulary, width)
    return config, weights


LAYOUTS = (Layout("Medusa", _fits, _read), Layout("Medusa (vLLM)", _fits_vllm, _read_vllm))
